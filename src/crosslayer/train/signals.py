"""How a run is asked to stop."""

import signal
from typing import Any


class StopSignals:
    """Within this context, SIGTERM and Ctrl-C set `received` and nothing else.

    A second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        except ValueError:  # only the main thread may have handlers
            pass
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
