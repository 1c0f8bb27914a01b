"""Where a model is cut into the stages of a pipeline: where they take as long as one another, and
need as much memory."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from torch import nn

from autofit.core.config import Config
from autofit.core.layout import chunks_of
from autofit.setup.model_part import ModelPart
from autofit.setup.streamed_blocks import is_whole

# A module, the name that it has for one of its weights, and the weight.
Weight = tuple[nn.Module, str, nn.Parameter]

# How many times what it passes on a block keeps for its backward, at least: of a Llama in bf16.
_KEPT = {"none": 17, "selective": 8, "alternate": 9}
_IN_FEW_BITS = {"nf4-dq": 0.52, "nf4": 0.57, "int8": 1.0}  # bytes of a weight, with its scales
_STATE = 8  # bytes of AdamW's for each trained weight
_HARDLY_MORE = 1.02  # times the seconds of the slowest stage, for less memory
_ADAPTER = "lora_"


@dataclass(frozen=True)
class Sizes:
    """How many numbers some weights have: those of matrices, and all others."""

    matrices: int
    others: int

    @classmethod
    def of(cls, weights: Iterable[nn.Parameter]) -> Self:
        """Those of some weights."""
        matrices = 0
        others = 0
        for weight in weights:
            if weight.dim() > 1:
                matrices += weight.numel()
            else:
                others += weight.numel()

        return cls(matrices, others)

    def nbytes(self, config: Config, *, in_block: bool) -> float:
        """What they take, with gradients and an optimizer's state where they are trained."""
        width = _width(config)
        if is_whole(config):
            return (self.matrices + self.others) * (2 * width + _STATE)

        of_matrix: float = width
        if in_block:
            of_matrix = _IN_FEW_BITS.get(config.quantization, width)

        return self.matrices * of_matrix + self.others * width


@dataclass(frozen=True)
class StageSizes:
    """What decides about cuts, adapters aside: a prediction cuts a model before it has any.

    Attributes:
        count: of the stages.
        blocks: of each block.
        first, last: of what is outside, used before the blocks and after.
        passed: how many numbers blocks pass on, of one sample.
    """

    count: int
    blocks: tuple[Sizes, ...]
    first: Sizes
    last: Sizes
    passed: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        part: ModelPart,
        outside: Sequence[Weight],
        used_before: set[nn.Module],
    ) -> Self:
        """Those of a model that is not cut yet."""
        adapters = {weight for name, weight in model.named_parameters() if _ADAPTER in name}
        first = {weight for module, _, weight in outside if module in used_before}
        last = {weight for module, _, weight in outside if module not in used_before}

        return cls(
            count=part.count,
            blocks=tuple(Sizes.of(set(block.parameters()) - adapters) for block in part.whole),
            first=Sizes.of(first - adapters),
            last=Sizes.of(last - adapters),
            passed=part.passed,
        )

    def cuts(self, config: Config) -> list[int]:
        """Where the row of blocks is cut: where the slowest stage takes least time, or hardly more
        and the largest one least memory.

        A block takes as long as it has numbers in matrices; the head, too. Looking up an embedding
        takes no time, but memory.
        """
        work = [block.matrices for block in self.blocks]
        work[-1] += self.last.matrices
        chunks = chunks_of(config)
        if chunks > 1:  # each device has some of the first, and of the last
            return balanced(work, self.count * chunks)

        blocks = [block.nbytes(config, in_block=True) for block in self.blocks]
        held = [0.0, *itertools.accumulate(blocks)]
        first = self.first.nbytes(config, in_block=False)
        last = self.last.nbytes(config, in_block=False)

        micro_batches = config.gradient_accumulation_steps or 1
        kept = self.passed * (config.micro_batch_size or 1) * _width(config)
        kept *= _KEPT.get(config.activation_checkpointing, 1)

        def nbytes(start: int, stop: int, stage: int) -> float:
            under_way = micro_batches
            if config.pipeline_schedule == "1f1b":
                under_way = min(micro_batches, self.count - stage)

            total = held[stop] - held[start] + under_way * kept * (stop - start)
            if stage == 0:
                total += first
            if stage == self.count - 1:
                total += last

            return total

        return balanced(work, self.count, nbytes)


def _width(config: Config) -> int:
    """The bytes of a number."""
    return 4 if config.precision in ("fp32", "tf32") else 2


def balanced(
    work: Sequence[float],
    parts: int,
    nbytes: Callable[[int, int, int], float] | None = None,
) -> list[int]:
    """Where to cut a row into consecutive parts, none empty: `parts` + 1 positions, 0 first.

    The largest part is as small as can be; among equal ones earlier parts are smaller, since more
    micro-batches are under way in them.

    Args:
        nbytes: of a part by its start, its end and its number: the most of any is as little as can
            be where the largest part hardly grows.
    """
    sums = [0.0, *itertools.accumulate(work)]

    def own(start: int, stop: int, _: int) -> float:
        return sums[stop] - sums[start]

    found = _least_largest(len(work), parts, own)
    assert found is not None, "there are as many as parts"
    if nbytes is None:
        return found

    most = _HARDLY_MORE * max(own(start, stop, 0) for start, stop in pairwise(found))

    def cost(start: int, stop: int, number: int) -> float:
        return nbytes(start, stop, number) if own(start, stop, number) <= most else math.inf

    return _least_largest(len(work), parts, cost) or found


def _least_largest(
    count: int,
    parts: int,
    cost: Callable[[int, int, int], float],
) -> list[int] | None:
    """The cuts with the least largest cost of any part, then the least sum of squares; None where
    all are infinite."""
    # best[end]: the largest part, the sum of squares and the cuts of the first `end` in so many
    # parts
    best: list[tuple[float, float, list[int]] | None] = [(0.0, 0.0, [0])] + [None] * count
    for number in range(1, parts + 1):
        following: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
        for end in range(number, count + 1):
            for start in range(number - 1, end):
                before = best[start]
                own = cost(start, end, number - 1)
                if before is None or math.isinf(own):
                    continue

                found = (max(before[0], own), before[1] + own**2, [*before[2], end])
                if following[end] is None or found < following[end]:  # type: ignore[operator]
                    following[end] = found

        best = following

    return None if best[count] is None else best[count][2]  # type: ignore[index]
