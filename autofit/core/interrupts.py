"""Ctrl-C, SIGTERM and a lost terminal end a training after the current step, with whole weights.

Whoever starts its processes passes the signals on and waits.
"""

import signal
import threading
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context manager that notes the first SIGINT, SIGTERM or SIGHUP in `received`.

    It passes the signal's number to a function; the second signal acts at once. Only in the main
    thread, where Python delivers signals, and only where nobody else handles or ignores them.
    """

    def __init__(self, noted: Callable[[int], None]) -> None:
        self.received: int | None = None
        self._noted = noted
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._note)

        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def act(self) -> None:
        """Do what the received signal does by default: KeyboardInterrupt, or ending."""
        assert self.received is not None, "the caller has looked"
        self.__exit__()
        signal.raise_signal(self.received)

    def _note(self, number: int, _: object) -> None:
        self.__exit__()
        self.received = number
        self._noted(number)
