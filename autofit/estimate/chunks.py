"""Chunks of a loss: two of them stand for as many as there are, of a number of tokens that tells their sizes apart.

How many tokens a chunk has follows neither the micro-batch nor its reciprocal, so no one trace would show what other
micro-batches take. With a prime number of tokens, what a chunk holds and computes is known for a chunk of any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autofit.estimate.recorder import Recorder
from autofit.estimate.scaling import Grid, Symbols
from autofit.techniques.loss import ROWS, token_slices

CHUNK = -1  # in place of a block, in marks: part of the forward that comes once for each chunk


@dataclass
class SampledChunks:
    """Marks the first chunk, which stands for itself, and the second, which stands for all others.

    `loss` is whose chunks they are.

    Attributes:
        seen: (tokens, features, vocabulary) of the loss in the trace; None where none was made in chunks, or too few
            tokens were there for two.
    """

    rows: int
    recorder: Recorder
    loss: str
    seen: tuple[int, int, int] | None = None

    def __call__(self, tokens: int, features: int, vocabulary: int) -> Iterator[slice]:
        """The tokens of two chunks."""
        if tokens < 2 * self.rows:
            yield from token_slices(tokens, features, vocabulary, rows=ROWS[self.loss])
            return
        self.seen = (tokens, features, vocabulary)
        for start in (0, self.rows):
            self.recorder.mark("forward", CHUNK)
            yield slice(start, start + self.rows)
        self.recorder.mark("forward")


def with_chunks(grid: Grid, symbols: Symbols, seen: tuple[int, int, int] | None, loss: str) -> Grid:
    """The grid with the tokens of a chunk of this loss, and the number of chunks, at each pair."""
    if seen is None:
        return grid
    tokens, features, vocabulary = seen
    wanted = [int(tokens / symbols.samples * samples) for samples in grid.samples.tolist()]
    return grid.with_chunks([(each, ROWS[loss](each, features, vocabulary)) for each in wanted])
