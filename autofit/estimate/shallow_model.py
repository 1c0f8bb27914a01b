"""A shallow stand-in for a deep model: few of its repeated blocks, few chunks of its loss, each
counted several times.

The cost of one more block is read off blocks in the middle, whose neighbours are like those of any
other middle block. The first and the last block stay: the embedding comes before the first, the
head after the last. Where weights are sharded the second stays, too: while a block's backward runs
the weights of the one before are gathered, which of the first is the embedding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from autofit.core.config import Config
from autofit.core.layout import Layout
from autofit.estimate.recorder import Recorder
from autofit.estimate.scaling import Grid, Symbols
from autofit.setup.layers import repeated_blocks
from autofit.techniques.loss import ROWS, token_slices

LONGEST_PERIOD = (
    8  # blocks: Gemma 3 has five of one kind and one of another; hybrids repeat every eight
)
# in place of a block, in marks: what runs once for each chunk of the loss
CHUNK = -1
_REACH_OF_GATHERING, _REACH_OF_STREAMING = 4, 3  # blocks
FROZEN = -2  # a block of a model that is not trained, or of the trained one without gradients


@dataclass(frozen=True)
class Depth:
    """How a shortened model stands for the `whole` number of blocks.

    It has `retained` blocks: the `first`, `period` ones that each stand for `repeats` blocks, and
    the last ones. The `early` ones of the first may do something else in a step than those that
    follow them.
    """

    whole: int
    retained: int
    period: int
    repeats: int
    first: int = 1
    early: int = 1

    @property
    def middle(self) -> range:
        """The retained blocks that each stand for `repeats` blocks."""
        return range(self.first, self.first + self.period)

    def stand_in(self, block: int) -> int:
        """The retained block that stands for one of the whole model."""
        if block < self.first:
            return block

        removed = self.whole - self.retained
        if block - removed >= self.first + self.period:
            return block - removed

        return self.first + (block - self.first) % self.period

    def times(self, block: int | None) -> int:
        """How many blocks one retained block stands for."""
        is_repeated = block == FROZEN or (block is not None and block in self.middle)
        return self.repeats if is_repeated else 1


@dataclass(frozen=True)
class Cut:
    """How to shorten a model.

    Attributes:
        first: how many of the first blocks stay.
        alternating: whether every second block is treated differently (checkpointing).
        reach: from a block to the farthest one that what happens in its own forward and backward is
            about: weights are gathered and streamed ahead, and let go later.
    """

    first: int = 1
    alternating: bool = False
    reach: int = 1

    @classmethod
    def of(cls, config: Config) -> Self:
        """The one for a config."""
        layout = Layout.of(config)
        alternating = config.activation_checkpointing == "alternate"
        if layout.shard * layout.context > 1:
            return cls(2, alternating, _REACH_OF_GATHERING)
        if config.parameter_offload != "none":
            return cls(1, alternating, _REACH_OF_STREAMING)

        return cls(1, alternating)

    @property
    def first_ones(self) -> int:
        """How many of the first blocks may do something else in a step than those after them."""
        return 1 + self.reach + self.alternating

    @property
    def last_ones(self) -> int:
        """The same of the last blocks."""
        return 1 + self.reach


def shorten(model: nn.Module, cut: Cut, *, periods: int = 0) -> Depth | None:
    """Remove middle blocks from the model; None where its blocks differ, or are too few to be worth
    it.

    Args:
        periods: how many periods stay at least between the first and the last ones of the cut.
    """
    container = _container(model)
    if container is None:
        return None

    whole = len(container)
    signatures = [_signature(model, block, index) for index, block in enumerate(container)]
    first = cut.first
    period = _period(signatures[cut.first : -1], 2 if cut.alternating else 1)
    if period is None:
        return None

    retained = first + 1 + period + (whole - first - 1) % period
    # What all blocks of a kind share, such as a mask, ends with the first of them.
    early = max(cut.first_ones, _first_of_each_kind(signatures))
    if periods:
        least = early + periods * period + cut.last_ones
        retained += max(0, math.ceil((least - retained) / period)) * period

    if retained >= whole:
        return None

    del container[first + period : first + period + whole - retained]
    return Depth(
        whole,
        retained,
        period,
        1 + (whole - retained) // period,
        first,
        early,
    )


def shorten_again(model: nn.Module, depth: Depth) -> int:
    """Remove one more period of a shortened model's middle blocks; how many blocks are left."""
    container = _container(model)
    assert container is not None, "it was shortened before"
    del container[depth.first + depth.period : depth.first + 2 * depth.period]

    return depth.retained - depth.period


def retain(model: nn.Module, numbers: Sequence[int]) -> None:
    """Remove all of the model's blocks but those of these numbers."""
    container = _container(model)
    assert container is not None, "it is one row of blocks"
    for number in reversed(range(len(container))):
        if number not in numbers:
            del container[number]


def _container(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The module that holds the model's blocks and nothing else."""
    blocks = repeated_blocks(model)
    for module in model.modules():
        if blocks and isinstance(module, nn.ModuleList | nn.Sequential) and list(module) == blocks:
            return module

    return None


def _period(middle: Sequence[object], step: int) -> int | None:
    """After how many blocks the same kinds follow again, a multiple of `step`."""
    for period in range(step, LONGEST_PERIOD + 1, step):
        if len(middle) >= period and all(
            a == b for a, b in zip(middle, middle[period:], strict=False)
        ):
            return period

    return None


def _first_of_each_kind(signatures: Sequence[object]) -> int:
    """How many of the first blocks are enough to have one of each kind."""
    seen: list[object] = []
    enough = 0
    for number, signature in enumerate(signatures, 1):
        if signature not in seen:
            seen.append(signature)
            enough = number

    return enough


def _signature(model: nn.Module, block: nn.Module, index: int) -> tuple[object, ...]:
    """What makes two blocks alike: their modules, the shapes of their weights and which are
    trained, and the kind their config names."""
    kinds = getattr(
        getattr(model, "config", None),
        "layer_types",
        None,
    )
    weights = tuple(
        (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        for name, weight in block.named_parameters()
    )
    modules = tuple(type(module) for module in block.modules())

    return modules, weights, kinds[index] if kinds and len(kinds) > index else None


@dataclass
class SampledChunks:
    """Two chunks of `rows` tokens of a chunked `loss`: the first stands for itself, the second for
    all others.

    A chunk's real number of tokens follows neither the micro-batch nor its reciprocal, so no single
    trace would show what other micro-batches take. From a prime number of tokens, a chunk of any
    size is known.
    """

    rows: int
    recorder: Recorder
    loss: str
    # (tokens, features, vocabulary) of the traced loss; None if it has no chunks, or too few tokens
    # for two.
    sizes: tuple[int, int, int] | None = None

    def __call__(self, tokens: int, features: int, vocabulary: int) -> Iterator[slice]:
        """The tokens of two chunks."""
        if tokens < 2 * self.rows:
            yield from token_slices(
                tokens,
                features,
                vocabulary,
                rows=ROWS[self.loss],
            )
            return

        self.sizes = (tokens, features, vocabulary)
        phase = self.recorder.marks[-1].phase  # a backward may compute chunks again
        for start in (0, self.rows):
            self.recorder.mark(phase, CHUNK)
            yield slice(start, start + self.rows)

        self.recorder.mark(phase)


def with_chunks(
    grid: Grid,
    symbols: Symbols,
    sizes: tuple[int, int, int] | None,
    loss: str,
) -> Grid:
    """The grid with the tokens of a chunk of this loss, and the number of chunks, at each pair."""
    if sizes is None:
        return grid

    traced, features, vocabulary = sizes
    counts = [int(traced / symbols.samples * samples) for samples in grid.samples.tolist()]

    return grid.with_chunks(
        [(tokens, ROWS[loss](tokens, features, vocabulary)) for tokens in counts]
    )
