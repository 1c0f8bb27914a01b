"""ModelPart: what one stage of a pipeline holds of a model, and what stands in for the rest.

The model's own code runs on every stage. Earlier blocks give what was received from the stage
before; at the first block of a later stage the forward ends. Weights outside blocks that this stage
does not hold are zeros that take no memory where the code uses them before the blocks, and have no
values where it must not use them.

Under an interleaved schedule a stage holds several rows of blocks, its chunks, and other stages the
rows between them: a micro-batch comes to it once for each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class StageEnd(BaseException):
    """Ends a forward at the first block of a later stage, through whatever loss called the model.

    Not an Exception, which such a loss may catch.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class Absent:
    """A weight outside blocks that another stage holds.

    Attributes:
        weight: as it was before the model was cut.
        zeros: stand in for it until a forward reaches the first block; None where the code must not
            use it at all.
    """

    module: nn.Module
    name: str
    weight: nn.Parameter
    zeros: torch.Tensor | None

    def show(self, value: torch.Tensor | None) -> None:
        """Have the module's code see a tensor; one without values for None."""
        if value is None:
            value = torch.empty_like(self.weight, device="meta")
        setattr(self.module, self.name, value.detach())


@dataclass
class ModelPart:
    """One stage of a pipeline.

    Attributes:
        blocks: the list of blocks in the model, with stand-ins for those of other stages.
        whole: all blocks, as they were before the model was cut.
        chunks: how many rows of blocks each stage holds.
        cuts: the number of each chunk's first block, and that of all blocks. The chunks of all
            stages take turns: stage 0 has the first one of each round.
        in_tuple: whether a block gives what it passes on as the first of a tuple.
        outside: every place of a weight outside blocks, and the stage that holds it.
        absent: places of such weights that other stages hold.
        names: of the tensors in the state dict of the whole model, in their order.
        buffers: the names of all buffers of the whole model.
        tied: trained weights outside blocks that both the first and the last stage hold, and their
            names in the whole model.
        received: what the stage before gave for the running micro-batch.
        start: the number of the running chunk's first block.
        passed: how many numbers are passed on, of one sample.
        passed_bytes: of what is passed on for each micro-batch.
        is_together: whether all stages are ready to train, and none has failed in a step: only then
            do they fetch weights from one another at the end.
        schedule: of the last batch, and what it was made for.
    """

    index: int
    count: int
    blocks: nn.ModuleList | nn.Sequential
    whole: list[nn.Module]
    chunks: int = 1
    cuts: list[int] = field(default_factory=list)
    in_tuple: bool = False
    outside: list[tuple[nn.Parameter, int]] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    tied: dict[nn.Parameter, str] = field(default_factory=dict)
    received: torch.Tensor | None = None
    start: int = 0
    passed: int = 0
    passed_bytes: int = 0
    is_together: bool = False
    schedule: tuple[Any, Any] | None = None

    @property
    def all_chunks(self) -> int:
        """The number of chunks, of all stages together."""
        return self.count * self.chunks

    @property
    def own_chunks(self) -> range:
        """The numbers of this stage's chunks."""
        return range(self.index, self.all_chunks, self.count)

    def blocks_of(self, chunk: int) -> range:
        """The numbers of a chunk's blocks."""
        return range(self.cuts[chunk], self.cuts[chunk + 1])

    def holds(self, block: int) -> bool:
        """Whether a block is this stage's."""
        return any(block in self.blocks_of(chunk) for chunk in self.own_chunks)

    @property
    def is_first(self) -> bool:
        """Whether this stage looks up what the batch holds."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.index == self.count - 1

    def begin(self, received: torch.Tensor | None) -> None:
        """Start a forward with what the stage before gave."""
        self.received = received
        for absent in self.absent:
            absent.show(absent.zeros)

    @contextmanager
    def only_chunk(self, chunk: int) -> Iterator[None]:
        """Inside, a forward goes through one chunk's blocks alone."""
        others = {
            number: self.blocks[number]
            for other in self.own_chunks
            if other != chunk
            for number in self.blocks_of(other)
        }
        for number, block in others.items():
            self.blocks[number] = Elsewhere(number, block, self)

        self.start = self.cuts[chunk]
        try:
            yield
        finally:
            for number, block in others.items():
                self.blocks[number] = block

    def reach_blocks(self) -> None:
        """From here on no forward may use what only stands in for a weight."""
        for absent in self.absent:
            if absent.zeros is not None:
                absent.show(None)

    @contextmanager
    def first_block_is(self, *stand_ins: nn.Module) -> Iterator[None]:
        """Inside, the model calls these instead of its first blocks."""
        before = [self.blocks[number] for number in range(len(stand_ins))]
        for number, stand_in in enumerate(stand_ins):
            self.blocks[number] = stand_in
        try:
            yield
        finally:
            for number, block in enumerate(before):
                self.blocks[number] = block


class Elsewhere(nn.Module):
    """A block of another chunk: gives what was received in place of an earlier one, and ends the
    forward in place of a later one."""

    block: nn.Module
    part: ModelPart

    def __init__(self, number: int, block: nn.Module, part: ModelPart) -> None:
        super().__init__()
        self.number = number
        # Not as submodules: another device holds its weights, or this one beside it.
        self.__dict__["block"] = block
        self.__dict__["part"] = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stage before gave, as a block gives it.

        Raises a StageEnd with what a later block would have been given.
        """
        part = self.part
        if self.number >= part.start:
            raise StageEnd(passed(args, kwargs))

        if self.number == 0:
            part.reach_blocks()

        return (part.received,) if part.in_tuple else part.received


def forward_alone(model: nn.Module, part: ModelPart | None, forward: Callable[[], Any]) -> Any:
    """What a forward of a cut model gives on this stage alone.

    Of drawn numbers, the same ones each time, where it would get some from the stage before.
    """
    if part is None:
        return forward()

    received = hidden_at_first_block(model, part, forward)
    if not part.is_first:
        generator = torch.Generator(received.device).manual_seed(0)
        received = torch.empty_like(received).normal_(generator=generator)

    chunk = part.own_chunks[-1 if part.is_last else 0]
    part.begin(received)
    try:
        with part.only_chunk(chunk):
            return forward()
    except StageEnd as end:
        return end_of_forward(model, end.hidden)


def hidden_at_first_block(
    model: nn.Module, part: ModelPart, forward: Callable[[], Any]
) -> torch.Tensor:
    """What the first block is given in a forward, which ends there: of zeros on later stages."""
    if isinstance(model, FSDPModule):  # it looks for all of its modules in its first forward
        fully_shard.state(model)._lazy_init()

    part.begin(None)
    try:
        with part.first_block_is(EndHere()):
            forward()
    except StageEnd as end:
        return end_of_forward(model, end.hidden)
    raise AssertionError("a model that was cut reaches its blocks")


def end_of_forward(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Do what FSDP does behind the forward of a root, which a StageEnd has skipped."""
    if not isinstance(model, FSDPModule):
        return hidden
    state = fully_shard.state(model)
    ended: torch.Tensor = state._post_forward(model, (), hidden)
    return ended


class EndHere(nn.Module):
    """In place of a block: ends the forward with what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a StageEnd with what the block would have been given."""
        raise StageEnd(passed(args, kwargs))


def passed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What blocks pass on: the first thing that one is given."""
    given: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return given
