"""Ctrl-C, SIGTERM and a lost terminal end a training after the current step, with whole weights,
and a search with what it has found.

Whoever starts a training's processes passes the signals on and waits.
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


class AsCtrlC:
    """A context manager in which SIGTERM and SIGHUP interrupt as Ctrl-C does.

    For what ends well at a KeyboardInterrupt. `exit_code` is the one that a shell expects of the
    signal that came.
    """

    def __init__(self) -> None:
        self.exit_code = 128 + signal.SIGINT
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "AsCtrlC":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _interrupt(self, number: int, _: object) -> None:
        self.exit_code = 128 + number
        raise KeyboardInterrupt
