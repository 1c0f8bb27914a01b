"""Signals that end a training after a step: on several ranks after the same one."""

from collections.abc import Callable

from autofit.core.interrupts import SIGNALS, Interrupts
from autofit.setup import Setup


class AgreedInterrupts(Interrupts):
    """Interrupts of one rank, of which all ranks act on the first that came to any of them."""

    def __init__(self, setup: Setup, noted: Callable[[int], None]) -> None:
        super().__init__(noted)
        self._ranks = setup.ranks

        # A signal that came to any of several ranks before a step's loss was known.
        self._agreed: int | None = None

        if self._ranks.are_several:
            setup.exchange.extra_reductions.append((self._own, self._agree))

    def came(self, *, is_last: bool) -> bool:
        """Whether training ends after this step, which is the last one anyway or not.

        A signal that came after a step's loss was added up over ranks counts with the next step's.
        """
        if self._ranks.are_several:
            if is_last:
                self._agree(list(self._ranks.largest(*self._own())))
            if self._agreed is None:
                return False
            self.received = self._agreed
        return self.received is not None

    def _own(self) -> list[float]:
        """The signals of this rank, as numbers that can be added up."""
        return [float(self.received == number) for number in SIGNALS]

    def _agree(self, anywhere: list[float]) -> None:
        """Note the first of the signals that came to any rank."""
        self._agreed = None
        for number, came in zip(SIGNALS, anywhere, strict=True):
            if came:
                self._agreed = number
                return
