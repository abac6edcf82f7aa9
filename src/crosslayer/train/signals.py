"""How a run is asked to stop."""

import signal
from typing import Any


class Signals:
    """SIGTERM and Ctrl-C ask a run to end with its step; a second Ctrl-C ends it at once."""

    asked: int | None = None

    def __enter__(self) -> "Signals":
        self.before = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self.hear)
        except ValueError:  # not the main thread, where nothing is heard
            pass
        return self

    def hear(self, number: int, frame: Any) -> None:
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
