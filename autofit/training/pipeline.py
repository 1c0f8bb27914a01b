"""Pipeline: the training step of one stage, by the schedules of torch.distributed.pipelining.

All stages read the same samples; each runs the model's code on every micro-batch, from what the
stage before gave to its own last block. The last stage has the loss, weighted as on one device.
"""

import contextlib
import logging
import re
from collections import deque
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    schedules,
)

from autofit.core.errors import RefusedError
from autofit.core.layout import goes_in_rounds
from autofit.data.batch import split, tensors
from autofit.data.counts import weight_of
from autofit.setup import Setup
from autofit.setup.model_part import (
    ModelPart,
    StageEnd,
    end_of_forward,
    hidden_at_first_block,
)
from autofit.training import random_state
from autofit.training.local_batch import LocalBatch
from autofit.training.loss import loss_and_count, on_device
from autofit.training.pipeline_cut import USES_ABSENT, refusal
from autofit.training.strategy import DataParallel

# A micro-batch, and the weight of its mean loss in that of the batch.
Slice = tuple[Any, float]
_FAILED = "failed to run forward"  # what PyTorch says around the error of a stage


class Pipeline(DataParallel):
    """The steps of one stage of a pipeline, beside which others may see other samples."""

    def forward_backward(self, part: LocalBatch) -> torch.Tensor:
        """As on one device; the micro-batches go through all stages at once."""
        setup = self.setup
        setup.progress.phase = "forward"
        batch_loss = torch.zeros((), device=setup.device)

        with setup.step_context():
            slices = self._weighted_slices(part)
            runs = self._runs(slices)
            for run in runs:
                loss = self._run(run, is_last=run is runs[-1])
                batch_loss += loss.to(batch_loss.dtype)

        return self._reduce(batch_loss)

    def loss_value(self, batch: Any) -> float:
        """The loss of a batch, by a forward through all stages alone; all call it together."""
        setup = self.setup
        with setup.step_context(), torch.no_grad():
            loss = self._run(
                [(batch, 1.0)],
                is_last=False,
                forward_only=True,
            )

        setup.exchange.reshard()

        mesh = setup.ranks.mesh
        assert mesh is not None, "stages are on several devices"
        value = loss.double()  # in one format on all stages, whatever the loss is in
        dist.all_reduce(value, group=mesh.get_group("pipeline"))

        return float(value)

    def _reduce(self, loss: torch.Tensor) -> torch.Tensor:
        """As of other ranks; what is added up beside the loss are numbers of one stage."""
        ranks = self.setup.ranks
        exchange = self.setup.exchange
        for average in exchange.after_backward:
            average()

        for numbers, use_sums in exchange.extra_reductions:
            own = torch.tensor(numbers(), device=loss.device)
            use_sums(ranks.sum_of_stage(own).tolist())

        return ranks.sum_of(loss) / ranks.layout.stage_world

    def _weighted_slices(self, part: LocalBatch) -> list[Slice]:
        """As many micro-batches as the rank with most has, each with its weight."""
        setup = self.setup
        slices, own_terms = self._counted_slices(part)
        forwards, _ = self._agree(
            part,
            own_terms,
            len(slices),
        )

        spare = next(
            split(
                part.batch,
                setup.micro_batch_size,
                setup.workload.split,
            )
        )

        weighted = []
        for micro_batch, count in slices:
            weight = 0.0
            if count:
                weight = weight_of(
                    setup.workload,
                    count,
                    setup.progress.terms,
                )

            weighted.append((micro_batch, weight * setup.ranks.layout.dp_degree))

        return weighted + [(spare, 0.0)] * (forwards - len(slices))

    def _runs(self, slices: list[Slice]) -> list[list[Slice]]:
        """The micro-batches that go through the stages together: all, where all have one shape.

        Else one after the other, on every rank: what stages exchange has one size.
        """
        shapes = {_shapes_of(micro_batch) for micro_batch, _ in slices}
        (most,) = self.setup.ranks.largest(len(shapes))
        if most <= 1:
            return [slices] if slices else []

        return [[one] for one in slices]

    def _run(
        self,
        slices: list[Slice],
        *,
        is_last: bool,
        forward_only: bool = False,
    ) -> torch.Tensor:
        """Send micro-batches of one shape through the stages; the sum of their losses, or 0.

        Args:
            is_last: gradients are averaged over ranks after it.
            forward_only: without gradients.
        """
        setup = self.setup
        part = setup.part
        assert part is not None, "only cut models have this strategy"

        slices = slices + [(slices[-1][0], 0.0)] * self._missing(len(slices))
        schedule, stages = self._schedule_for(slices, forward_only)
        for stage in stages:
            stage.clear_runtime_states()
            stage.submod.slices = slices
            stage.is_last_run = is_last
            stage.outputs.clear()

        numbers = [{"number": number} for number in range(len(slices))]
        first = [(torch.zeros((), device=setup.device),)] * len(slices)
        losses: list[torch.Tensor] = []
        try:
            with _without_the_schedule():
                schedule._step_microbatches(
                    first if part.is_first else None,
                    numbers,
                    target_mbs=numbers,
                    losses=None if forward_only else losses,
                    return_outputs=False,
                )
            stages[0].await_sent(0)
        except RuntimeError as error:
            # with its own kind, by which it is told
            if _FAILED in str(error) and error.__cause__ is not None:
                raise error.__cause__ from None

            raise
        finally:
            for stage in stages:
                stage.submod.slices = []
                stage.sent.clear()

            part.received = None

        if forward_only and part.is_last:
            losses = stages[-1].outputs
        if not losses:
            return torch.zeros((), device=setup.device)

        total = torch.stack([loss.detach() for loss in losses]).sum()
        stages[-1].outputs.clear()

        return total

    def _missing(self, micro_batches: int) -> int:
        """How many micro-batches, which count nothing, make so many a number that goes through."""
        part = self.setup.part
        assert part is not None, "only cut models have this strategy"
        missing = 0
        if part.chunks > 1:
            while not goes_in_rounds(micro_batches + missing, part.count):
                missing += 1

        return missing

    def prepare(self, batch: Any) -> None:
        """Make what a step of such a batch exchanges through, before it."""
        setup = self.setup
        micro_batches = split(batch, setup.micro_batch_size, setup.workload.split)
        with setup.step_context():
            self._schedule_for([(each, 1.0) for each in micro_batches], forward_only=False)

    def _schedule_for(
        self,
        slices: list[Slice],
        forward_only: bool,
    ) -> tuple[Any, list["_Stage"]]:
        """The schedule for such micro-batches, the last one's where it was made for the same; and
        what it goes through on this device."""
        setup = self.setup
        part = setup.part
        assert part is not None, "only cut models have this strategy"
        first = on_device(setup, slices[0][0])
        key: Hashable = (_shapes_of(first), len(slices), forward_only)
        made: tuple[Any, list[_Stage]]
        if part.schedule is not None and part.schedule[0] == key:
            made = part.schedule[1]
            return made

        part.schedule = None  # its buffers are freed before there are others
        hidden = _hidden_of(setup, part, first)
        part.passed_bytes = hidden.nbytes
        make = _in_chunks if part.chunks > 1 else _in_one_row
        made = make(setup, part, hidden, len(slices), forward_only)
        part.schedule = (key, made)

        return made


@contextlib.contextmanager
def _without_the_schedule() -> Iterator[None]:
    """Where a micro-batch fails, PyTorch logs all of the schedule above the error."""
    logger = logging.getLogger(schedules.__name__)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _in_one_row(
    setup: Setup,
    part: ModelPart,
    hidden: torch.Tensor,
    micro_batches: int,
    forward_only: bool,
) -> tuple[Any, list["_Stage"]]:
    """The schedule of a stage that holds one row of blocks."""
    kind: Any = ScheduleGPipe
    under_way = micro_batches
    if setup.config.pipeline_schedule == "1f1b" and micro_batches >= part.count:
        kind = Schedule1F1B
        under_way = under_way_in(
            part.index,
            part.count,
            micro_batches,
        )

    stage = _Stage(_Forward(setup, part, part.index, hidden))
    stage.under_way = 1 if forward_only else under_way
    stage.has_backward = not forward_only

    schedule = kind(
        stage,
        micro_batches,
        loss_fn=None if forward_only else _same,
        scale_grads=False,
    )
    schedule._initialize_stage((), {})  # which makes the buffers

    return schedule, [stage]


def _in_chunks(
    setup: Setup,
    part: ModelPart,
    hidden: torch.Tensor,
    micro_batches: int,
    forward_only: bool,
) -> tuple[Any, list["_Stage"]]:
    """The schedule of a stage that holds several rows of blocks, each a stage of PyTorch's."""
    sent: deque[_Sent] = deque()
    chunks = []
    for number in part.own_chunks:
        chunk = _Chunk(_Forward(setup, part, number, hidden))
        chunk.has_backward = not forward_only
        chunk.sent = sent
        chunks.append(chunk)

    schedule = ScheduleInterleaved1F1B(
        chunks,
        micro_batches,
        loss_fn=None if forward_only else _same,
        scale_grads=False,
    )
    actions = [str(action) for action in schedule.pipeline_order_with_comms[part.index]]
    for chunk in chunks:
        of_chunk = partial(_most_between, actions, chunk.stage_index)
        chunk.under_way = of_chunk("RECV_F", "F" if forward_only else "B")
        chunk.gradients = of_chunk("RECV_B", "B")

    schedule._initialize_stages((), {})  # which makes the buffers

    return schedule, list(chunks)


def _most_between(actions: list[str], chunk: int, begin: str, end: str) -> int:
    """Of how many micro-batches a chunk has begun something and not ended, at most; 1 for none.

    Args:
        actions: as PyTorch's schedules write them: "2F5" is the forward of micro-batch 5 in chunk 2.
    """
    most = 1
    now = 0
    for action in actions:
        if re.fullmatch(f"{chunk}{begin}[0-9]+", action):
            now += 1
            most = max(most, now)
        elif re.fullmatch(f"{chunk}{end}[0-9]+", action):
            now -= 1

    return most


def under_way_in(stage: int, stages: int, micro_batches: int) -> int:
    """How many micro-batches have begun and not ended in a stage, at most, under 1F1B."""
    return min(micro_batches, stages - stage)


def _same(loss: torch.Tensor, _: Any) -> torch.Tensor:
    """The loss, which is all that the last stage gives."""
    return loss


def _shapes_of(batch: Any) -> Hashable:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors(batch))


def _hidden_of(setup: Setup, part: ModelPart, batch: Any) -> torch.Tensor:
    """What blocks pass on for such a micro-batch, without values: as the first one is given it."""
    forward = partial(loss_and_count, setup, batch)
    with random_state.preserved(setup.device), torch.no_grad(), setup.forward_context():
        hidden = hidden_at_first_block(setup.model, part, forward)

    setup.exchange.reshard()

    return hidden.to("meta")


class _Forward(nn.Module):
    """The forward of a micro-batch by its number, through one chunk of blocks."""

    setup: Setup
    part: ModelPart
    hidden: torch.Tensor

    def __init__(
        self,
        setup: Setup,
        part: ModelPart,
        chunk: int,
        hidden: torch.Tensor,
    ) -> None:
        super().__init__()
        self.slices: list[Slice] = []
        self.chunk = chunk
        self.__dict__["setup"] = setup
        self.__dict__["part"] = part
        self.__dict__["hidden"] = hidden

    def forward(self, received: torch.Tensor, *, number: int) -> torch.Tensor:
        """What is passed on, or the weighted loss on the last stage."""
        setup: Any = self.setup
        part: Any = self.part
        micro_batch, weight = self.slices[number]
        setup.progress.phase = "forward"

        part.begin(received if self.chunk else None)
        try:
            with setup.forward_context(), part.only_chunk(self.chunk):
                loss, _ = loss_and_count(setup, on_device(setup, micro_batch))
        except StageEnd as end:
            return self._passed_on(end_of_forward(setup.model, end.hidden))

        if self.chunk != part.all_chunks - 1:
            raise AssertionError("a forward ends at the blocks of a later stage")

        _check_values(setup, loss)
        return loss * weight if weight else loss.nan_to_num() * 0.0

    def _passed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        _check_values(self.setup, hidden)

        expected: Any = self.hidden
        if hidden.shape != expected.shape or hidden.dtype != expected.dtype:
            raise RefusedError(
                f"pipeline_parallel: a block gives {tuple(hidden.shape)} of {hidden.dtype} where "
                f"the first one is given {tuple(expected.shape)} of {expected.dtype}; use "
                "data_parallel: fsdp."
            )

        return hidden.contiguous()


def _check_values(setup: Any, made: torch.Tensor) -> None:
    """Refuse what was computed from weights of other stages, which have no values.

    Not every operation says so by itself.
    """
    if made.is_meta:
        raise refusal(setup, USES_ABSENT)


# What was sent, and what tells that it has arrived.
_Sent = tuple[Any, Any]
_SENT = 2  # that may be on their way at once


class _Stage(PipelineStage):  # type: ignore[misc]
    """A stage whose buffers are as many as micro-batches are under way in it.

    PyTorch's own has one for each micro-batch of the batch.

    Attributes:
        under_way: the buffers for what is received.
        gradients: the buffers for gradients: one may still be on its way on when the next one
            comes.
        is_last_run: gradients are averaged over ranks after it.
        outputs: of forwards alone.
        sent: what was sent last.
    """

    def __init__(self, forward: _Forward) -> None:
        setup = forward.setup
        part = forward.part
        chunk = forward.chunk

        scalar = torch.zeros((), device="meta")
        is_last = chunk == part.all_chunks - 1
        given = forward.hidden.clone().requires_grad_() if chunk else scalar
        made = scalar if is_last else forward.hidden.clone().requires_grad_()
        mesh = setup.ranks.mesh
        assert mesh is not None, "stages are on several devices"

        super().__init__(
            forward,
            chunk,
            part.all_chunks,
            setup.device,
            input_args=(given,),
            output_args=(made,),
            group=mesh.get_group("pipeline"),
        )

        self._setup = setup
        self.under_way = 1
        self.gradients = 2
        self.is_last_run = True
        self.outputs: list[torch.Tensor] = []
        self.sent: deque[_Sent] = deque()

    def await_sent(self, most: int) -> None:
        """Wait until at most so much is on its way."""
        while len(self.sent) > most:
            work, _ = self.sent.popleft()
            work.wait()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's; a forward alone keeps its loss, and nothing for a backward."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self.outputs.append(output)

        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        *args: Any,
        last_backward: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As PyTorch's, with gradients averaged over ranks in the last one of a step."""
        if not self.has_backward:
            return None

        self._setup.progress.phase = "backward"
        self._setup.exchange.sync_gradients(last_backward and self.is_last_run)

        return super().backward_one_chunk(
            bwd_chunk_id,
            *args,
            last_backward=last_backward,
            **kwargs,
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """As PyTorch's; what is sent is not kept beside it."""
        operations: list[Any] = super().get_bwd_send_ops(bwd_chunk_id)
        for info in self.args_recv_info[bwd_chunk_id]:
            if info.buffer is not None:
                info.buffer.grad = None

        return operations

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """Buffers for what is received, used in turn."""
        several = min(num_microbatches, self.under_way)
        super()._setup_forward_recv_info(several, has_backward)
        _repeat(self.args_recv_info, several, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        """Buffers for gradients, used in turn."""
        several = min(num_microbatches, self.gradients)
        super()._setup_backward_recv_info(several)
        _repeat(self.grad_recv_info, several, num_microbatches)
        self.chunks = num_microbatches


class _Chunk(_Stage):
    """One of several rows of blocks on a device. What it sends is kept until it has arrived, not
    to the end of the step."""

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Nothing that PyTorch is to send: it is sent."""
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Nothing that PyTorch is to send: it is sent."""
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, operations: list[Any]) -> list[Any]:
        self.await_sent(_SENT - 1)
        if operations:
            (work,) = dist.batch_isend_irecv(operations)
            self.sent.append((work, operations[0].tensor))

        return []


def _repeat(infos: dict[int, Any], several: int, count: int) -> None:
    for number in range(several, count):
        infos[number] = infos[number % several]
