"""Encoding: many configs as one table of small numbers, so that a question is answered for all of them at once."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autofit.core.config import Value

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
MICRO_BATCH = "micro_batch_size"


class Encoding:
    """The values of some configs by all `knobs` that any of them has: the distinct `values` of each, of which `codes`
    [configs, knobs] are the indices, and the `doublings` of the micro-batch."""

    def __init__(self, configs: Sequence[Mapping[str, Value]]) -> None:
        self.knobs = tuple(dict.fromkeys(knob for config in configs for knob in config))
        self._codes: dict[str, dict[tuple[type, Value], int]] = {knob: {} for knob in self.knobs}
        self.codes: Codes = np.empty((len(configs), len(self.knobs)), dtype=np.int32)
        for column, knob in enumerate(self.knobs):
            codes = self._codes[knob]
            for row, config in enumerate(configs):
                value = config.get(knob)
                self.codes[row, column] = codes.setdefault((type(value), value), len(codes))  # True is not 1
        self.values = {knob: tuple(value for _, value in codes) for knob, codes in self._codes.items()}
        self.doublings = doublings(configs)

    def encoded(self, configs: Sequence[Mapping[str, Value]]) -> Codes:
        """Other configs by the same codes: [configs, knobs], -1 for a value that none of these has."""
        rows = [
            [codes.get((type(value := config.get(knob)), value), -1) for knob, codes in self._codes.items()]
            for config in configs
        ]
        return np.array(rows, dtype=np.int32).reshape(len(configs), len(self.knobs))

    def where(self, knob: str, holds: Callable[[Value], bool]) -> Mask:
        """Which configs have a value of the knob for which a condition holds; a missing knob is None."""
        if knob not in self.values:
            return np.full(len(self.codes), holds(None))
        holding = np.array([holds(value) for value in self.values[knob]], dtype=bool)
        return np.asarray(holding[self.codes[:, self.knobs.index(knob)]])


def doublings(configs: Sequence[Mapping[str, Value]]) -> npt.NDArray[np.float64]:
    """log2 of each micro-batch, 0 where there is none."""
    return np.array([math.log2(int(config.get(MICRO_BATCH) or 1)) for config in configs])
