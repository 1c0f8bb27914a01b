"""Scaling: one trace for all micro-batches and LoRA ranks.

The traced micro-batch, rank and tokens of a chunk of the loss are primes that divide no other size
of the model or its data. A byte count or number of operations grows with each of them as often as
it is divisible by that prime.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from autofit.core.errors import UntraceableError

Floats = npt.NDArray[np.float64]
_PRIMES = (
    13,
    11,
    17,
    19,
    23,
    29,
    31,
    37,
    41,
    43,
)
_POWERS = 2  # nothing traced today grows with the square; a loss of pairs of samples would


@dataclass(frozen=True)
class Symbols:
    """The primes that stand for the micro-batch, the LoRA rank and the tokens of a chunk of the
    loss in a trace."""

    samples: int
    rank: int
    rows: int

    @classmethod
    def for_sizes(cls, sizes: Iterable[int]) -> Self:
        """Primes that divide none of these sizes.

        Raises:
            UntraceableError: fewer than three are left.
        """
        distinct = set(sizes) - {0}
        free = [prime for prime in _PRIMES if all(size % prime for size in distinct)]
        if len(free) < 3:
            raise UntraceableError(
                "too many primes divide this model's sizes for three to be left to trace it with."
            )

        return cls(*free[:3])


# primes that divide no size: amounts stay as traced
UNSCALED = Symbols(
    2**31 - 1,
    2**61 - 1,
    2**19 - 1,
)


@dataclass(frozen=True)
class Grid:
    """The (micro-batch, rank) pairs that amounts are wanted for.

    Attributes:
        rows: the tokens of a chunk of the loss at each pair; 0 without chunks.
        chunks: the number of chunks at each pair; 0 without chunks.
    """

    samples: Floats
    ranks: Floats
    rows: Floats
    chunks: Floats

    @classmethod
    def of(cls, samples: Iterable[int], ranks: Iterable[int]) -> Self:
        """Every micro-batch with every rank, the ranks changing fastest."""
        pairs = np.array([(size, rank) for size in samples for rank in ranks], float).reshape(-1, 2)
        none = np.zeros(len(pairs))

        return cls(
            pairs[:, 0].copy(),
            pairs[:, 1].copy(),
            none,
            none,
        )

    def with_chunks(self, tokens_and_rows: Iterable[tuple[int, int]]) -> Self:
        """The same pairs, given all tokens of the loss and those of a chunk at each; the last chunk
        may be partial."""
        tokens, rows = np.array(list(tokens_and_rows), float).T
        return replace(self, rows=rows, chunks=tokens / rows)

    def amounts(self, traced: Iterable[int], symbols: Symbols) -> Floats:
        """The traced amounts at each pair: [amounts, pairs]."""
        quotients = np.fromiter(traced, dtype=np.int64)
        factors = np.ones((len(quotients), len(self.samples)))
        scales = [
            (symbols.samples, self.samples),
            (symbols.rank, self.ranks),
        ]
        if self.rows.all():
            scales.append((symbols.rows, self.rows))

        for prime, values in scales:
            for _ in range(_POWERS):
                divisible = (quotients % prime == 0) & (quotients > 0)
                quotients = np.where(divisible, quotients // prime, quotients)
                factors = np.where(divisible[:, None], factors * values[None, :], factors)

        return quotients[:, None] * factors


ONE = Grid.of([1], [1])
