"""Whether micro-batches train what was written: 40 losses that are means or sums, and 20 that couple the samples of a
batch, as `fit` finds them out. `python -m benchmarks.equal_work`; two minutes on two cores.

A loss that splits must be split and its count named, by weights on a batch that was not seen before; then gradients of
micro-batches must be those of the whole batch: within 1e-5 of its size in fp32 and 1e-10 in fp64, on 1 and 2 ranks. The
oracle is the plain gradient of the whole batch in fp64. None that couples samples may be split. Random draws of the
whole batch are replayed to micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from autofit.core.hardware import Hardware
from autofit.core.workload import Traits, Workload
from autofit.data.batch import map_tensors, own_samples, sample_count, split
from autofit.data.counts import is_sum, loss_count
from autofit.distributed.launcher import on_ranks
from autofit.hardware.device import detect
from autofit.setup import Setup
from autofit.techniques import precision
from autofit.training.build import build
from autofit.training.inspect import Prover
from autofit.training.local_batch import LocalBatch
from autofit.training.loss import loss_and_count
from autofit.training.recorded_draws import RecordedDraws
from autofit.training.step import accumulate
from autofit.training.workload import training_workload, without_weights
from benchmarks.drawn_losses import Case, drawn

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}
LEAST_SPLIT = 38  # of 40 losses that can be
_BATCHES = 3  # that the proof may see
_UNSEEN = 99  # the number of one that it does not
_PLACE = "place"  # of each sample in the whole batch


@dataclass(frozen=True)
class Found:
    """What was found of a case: its traits, whether the count is right, and the largest deviation of its gradients."""

    traits: Traits
    is_named: bool
    seconds: float


def workload_of(case: Case) -> Workload:
    """The workload of `fit` for it; its model has random weights."""
    model = case.model()
    batches = [case.batch(case.seed + number) for number in range(_BATCHES)]
    return without_weights(training_workload(model, batches, case.loss), model)


def find(case: Case, hardware: Hardware) -> Found:
    """What the proof says, and whether its count weighs slices of an unseen batch as the case does."""
    random.seed(0)
    torch.manual_seed(0)
    workload = workload_of(case)
    start = time.perf_counter()
    traits = Prover.of(workload, workload.model(), hardware).traits()
    seconds = time.perf_counter() - start
    return Found(
        traits, traits.splits and _is_named(case, replace(workload, traits=traits)), seconds
    )


def _is_named(case: Case, workload: Workload) -> bool:
    if not case.splits:
        return False
    if case.terms is None:
        return is_sum(workload)
    parts = list(split(case.batch(case.seed + _UNSEEN), 1))
    found = torch.tensor([float(loss_count(workload, part)) for part in parts], dtype=torch.float64)
    right = torch.tensor([float(case.terms(part)) for part in parts], dtype=torch.float64)
    return torch.allclose(found / found.sum(), right / right.sum(), rtol=1e-12)


@contextlib.contextmanager
def _format(dtype: torch.dtype) -> Iterator[None]:
    """Trains in this format what the knobs call fp32."""
    torch.set_default_dtype(dtype)
    try:
        formats = mock.patch.dict(precision._FORMATS, fp32=(dtype, dtype))
        with formats, mock.patch.object(precision, "_FP32", dtype):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def deviation(
    case: Case, traits: Traits, hardware: Hardware, dtype: torch.dtype, micro: int
) -> float:
    """How far the gradient of micro-batches is from that of the whole batch in fp64, on this process's ranks."""
    batch = {**case.batch(case.seed + _UNSEEN)}
    samples = sample_count(batch)
    batch[_PLACE] = torch.arange(samples)
    oracle, draws = _whole_gradient(case, traits, hardware, batch)

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = {"micro_batch_size": micro, **({"data_parallel": "ddp"} if ranks > 1 else {})}
    with _format(dtype):
        setup = build(
            _workload(case, traits, _replayed(case, draws)), config, hardware.of_several(ranks)
        )
        _same_weights(setup, dtype)
        own, counts = own_samples(batch, setup.ranks.dp_rank, ranks)
        part = LocalBatch(
            map_tensors(own, lambda tensor: _cast(tensor, dtype)),
            counts,
            samples,
            -(-samples // ranks),
        )
        with draws:
            accumulate(setup, part)
        names = dict(setup.trainable())
        found = {
            name: weight.grad.double() for name, weight in names.items() if weight.grad is not None
        }
        setup.close()
    difference = sum(
        float((found.get(name, torch.zeros(())) - given).pow(2).sum())
        for name, given in oracle.items()
    )
    size = sum(float(given.pow(2).sum()) for given in oracle.values())
    return (difference / size) ** 0.5


def _whole_gradient(
    case: Case, traits: Traits, hardware: Hardware, batch: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], RecordedDraws]:
    """The gradient of the whole batch by each weight, in fp64, and the random draws that it took."""
    with _format(torch.float64):
        setup = build(_workload(case, traits, case.loss), {}, hardware)
        _same_weights(setup, torch.float64)
        torch.manual_seed(_UNSEEN)  # on every rank the same draws
        draws = RecordedDraws(sample_count(batch))
        with draws:
            loss, _ = loss_and_count(
                setup, map_tensors(batch, lambda tensor: _cast(tensor, torch.float64))
            )
        names = dict(setup.trainable())
        gradients = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
        setup.close()
    return {
        name: each for name, each in zip(names, gradients, strict=True) if each is not None
    }, draws


def _workload(case: Case, traits: Traits, loss: Callable[..., Any]) -> Workload:
    return replace(workload_of(case), loss=loss, traits=traits)


def _replayed(case: Case, draws: RecordedDraws) -> Callable[..., Any]:
    """The loss, which gets the random draws that each of its samples had in the whole batch."""

    def loss(model: torch.nn.Module, batch: dict[str, Any]) -> Any:
        if _PLACE in batch:
            draws.replay(batch[_PLACE].tolist())
        return case.loss(model, batch)

    return loss


@torch.no_grad()
def _same_weights(setup: Setup, dtype: torch.dtype) -> None:
    """The same random weights in every format."""
    generator = torch.Generator().manual_seed(1)
    for _, weight in setup.trainable():
        values = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
        scale = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.1
        weight.copy_((values * scale + (1.0 if weight.dim() == 1 else 0.0)).to(dtype))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def deviations(
    say: object, cases: Sequence[tuple[Case, Traits]], hardware: Hardware, micro: int
) -> list[dict[torch.dtype, float]]:
    """The deviations of all cases in both formats."""
    torch.set_num_threads(1)
    return [
        {dtype: deviation(case, traits, hardware, dtype, micro) for dtype in BOUNDS}
        for case, traits in cases
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found of every case; 0 where all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--splitting", type=int, default=40, help="losses that split, at least one of each kind"
    )
    options = parser.parse_args(arguments)
    hardware = detect("cpu")
    cases = drawn(options.seed, options.splitting)
    found = [find(case, hardware) for case in cases]

    for case, each in zip(cases, found, strict=True):
        is_split = each.traits.splits and not each.traits.batch_norm
        is_right = each.is_named if case.splits else not is_split
        verdict = str(each.traits.count) if is_split else "not split"
        print(
            f"{'ok' if is_right else 'WRONG':5} {case.name:45} {verdict:45} {each.seconds:.2f} s",
            flush=True,
        )

    proven = [
        (case, each.traits)
        for case, each in zip(cases, found, strict=True)
        if case.splits and each.is_named
    ]
    alone = deviations(None, proven, hardware, 1)
    beside = on_ranks(deviations, proven, hardware, 2, count=2, device="cpu")
    worst = {dtype: max(each[dtype] for each in (*alone, *beside)) for dtype in BOUNDS}

    wanted = sum(case.splits for case in cases)
    wrongly = [
        case.name for case, each in zip(cases, found, strict=True) if _is_wrongly_split(case, each)
    ]
    print(f"{len(proven)} of {wanted} losses that split are split, with the right count")
    print(
        f"{len(wrongly)} of {len(cases) - wanted} that couple samples are split: {', '.join(wrongly) or 'none'}"
    )
    print(
        f"gradients of micro-batches, on 1 and 2 ranks: within {worst[torch.float32]:.1e} of the whole batch's in"
    )
    print(f"fp32, and {worst[torch.float64]:.1e} in fp64")
    fine = all(worst[dtype] <= bound for dtype, bound in BOUNDS.items())
    return int(not (fine and not wrongly and len(proven) >= wanted - (40 - LEAST_SPLIT)))


def _is_wrongly_split(case: Case, found: Found) -> bool:
    return (
        found.traits.splits and not found.traits.batch_norm and not (case.splits and found.is_named)
    )


if __name__ == "__main__":
    sys.exit(main())
