"""Encoding: many configs as one table of small numbers, so that all are asked at once."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autofit.core.config import Config, Value

Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32]
Configs = Sequence[Config]
KnobValues = Mapping[str, tuple[Value, ...]]  # of each knob
_Typed = tuple[type, Value]  # True is not 1

MICRO_BATCH = "micro_batch_size"


class Encoding:
    """The values of some configs, as codes.

    Attributes:
        knobs: all that any of the configs has.
        codes: [configs, knobs], numbers of the distinct values of each knob.
        doublings: of each config's micro-batch.
    """

    def __init__(self, configs: Configs) -> None:
        self.knobs = tuple(dict.fromkeys(itertools.chain.from_iterable(configs)))
        self.codes: Codes = np.empty((len(configs), len(self.knobs)), dtype=np.int32)
        self._codes: dict[str, dict[_Typed, int]] = {}
        for column, knob in enumerate(self.knobs):
            codes: dict[_Typed, int] = {}
            for row, config in enumerate(configs):
                value = config.get(knob)
                code = codes.setdefault((type(value), value), len(codes))
                self.codes[row, column] = code
            self._codes[knob] = codes

        self.doublings = doublings(configs)

    def encoded(self, configs: Configs) -> Codes:
        """Other configs by the same codes: [configs, knobs], -1 for a value that none here has."""
        encoded = np.empty((len(configs), len(self.knobs)), dtype=np.int32)
        for column, (knob, codes) in enumerate(self._codes.items()):
            for row, config in enumerate(configs):
                value = config.get(knob)
                encoded[row, column] = codes.get((type(value), value), -1)

        return encoded

    def where(self, knob: str, holds: Callable[[Value], bool]) -> Mask:
        """Which configs have a value of the knob for which a condition holds.

        Args:
            holds: asked once for each distinct value; a missing knob is None.
        """
        if knob not in self._codes:
            return np.full(len(self.codes), holds(None))

        holding = np.array([holds(value) for _, value in self._codes[knob]], dtype=bool)
        column = self.knobs.index(knob)
        return np.asarray(holding[self.codes[:, column]])

    def classes(self, same: Callable[[str, Value], Value]) -> npt.NDArray[np.intp]:
        """A number of each config, equal for those whose values are the same.

        Args:
            same: the value of a knob that stands for another one.
        """
        columns = self.codes.copy()
        for column, knob in enumerate(self.knobs):
            numbers: dict[_Typed, int] = {}
            merged = []
            for _, value in self._codes[knob]:
                standing = same(knob, value)
                merged.append(numbers.setdefault((type(standing), standing), len(numbers)))
            if merged:
                columns[:, column] = np.array(merged)[self.codes[:, column]]

        _, classes = np.unique(columns, axis=0, return_inverse=True)
        return classes.reshape(-1)


def doublings(configs: Configs) -> npt.NDArray[np.float64]:
    """log2 of each micro-batch, 0 where there is none."""
    sizes = (config.get(MICRO_BATCH) or 1 for config in configs)
    return np.array([math.log2(int(size)) for size in sizes])
