"""How a run is asked to stop."""

import os
import signal
from typing import Any


class StopSignals:
    """Within this context, SIGTERM and Ctrl-C set `received` and nothing else.

    A second Ctrl-C interrupts at once. Contexts can be nested: the inner one knows of signals that
    came before it, and the outer one of those that the inner one received. A rank of torchrun is
    also asked to stop by the death of torchrun's agent, which started it: nobody else would end it.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._previous_handlers: dict[int, Any] = {}
        self._outer: StopSignals | None = None

    def __enter__(self) -> "StopSignals":
        outer = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        self._outer = outer if isinstance(outer, StopSignals) else None
        self.received = self._outer.received if self._outer else None
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous_handlers[number] = signal.signal(number, self._receive)
        except ValueError:  # only the main thread may have handlers
            pass
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous_handlers.items():
            # None: it was set by other code than Python's, and cannot be set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._outer is not None:
            self._outer.received = self.received

    @property
    def ask_to_stop(self) -> bool:
        """Whether a signal came, or the agent died."""
        is_orphan = self._agent is not None and os.getppid() != self._agent
        return self.received is not None or is_orphan

    def _receive(self, number: int, frame: Any) -> None:
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
