"""Asks a run to stop at the next step when a signal comes."""

import signal
from types import FrameType


class StopSignals:
    """While open, SIGINT, SIGTERM and SIGUSR1 set `asked`; a second one acts as ever.

    Ranks decide together: each adds its `asked` to the message that ends every step.
    """

    _HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        self.name = ""
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in self._HANDLED:
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.name = signal.Signals(number).name
        signal.signal(number, self._before[number])
