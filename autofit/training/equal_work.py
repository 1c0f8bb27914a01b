"""Proof that micro-batches train what the whole batch trains, and what a loss averages over.

The gradient of a few samples together is compared with the gradients of each of them alone. Where the first is a
weighted sum of the others, the weights tell what the loss averages over: they are those of samples, of valid labels,
or of another count of the batch. Where it is no such sum, or no count has these weights, the loss cannot be split.

Gradients show this whatever the values of weights. The loss alone does not: with a head of zeros that of every sample
is the same. So the proof is of a copy with random weights, in fp64 where that is cheap, else in fp32.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from autofit.core.errors import describe_error
from autofit.core.workload import Count, Workload
from autofit.data import counts
from autofit.data.batch import is_own, map_tensors, sample_count, split, take_samples, tensors
from autofit.data.trial_batches import TRIAL_SAMPLES, altered, diversified, ignores, shortened
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.training import random_state
from autofit.training.call_state import CallState
from autofit.training.meta_model import DRAWN_DEVIATION
from autofit.training.recorded_draws import RecordedDraws
from autofit.training.sampled_gradients import NothingToCompareError, SampledGradients
from autofit.training.smooth_relu import SmoothRelu
from autofit.training.varied_outcomes import VariedOutcomes

Found = TypeVar("Found")
_CHEAP = 4_000_000  # weights of a model that is tried in fp64
_FEW = 2048  # numbers of a weight that tell how it was drawn
# Relative deviations that rounding may cause: at least, and in proportion to what another order of the samples causes.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 2e-5}
_ROUNDING_FACTOR = 10.0
# of another order; with more a loss is not the same twice
_MOST_NOISE = {torch.float64: 1e-5, torch.float32: 1e-4}
_GIVEN_COUNT = 1e-6  # a count of the user's may be a sum of fp32 numbers
_DOUBTFUL = 1e-2  # a deviation in fp32 that may still be rounding, so that fp64 decides
_SAME_WEIGHT = 1e-3  # of a sample, by two counts that gradients cannot tell apart
# second by largest singular value of gradients that tell nothing
_ALIKE = {torch.float64: 1e-7, torch.float32: 1e-3}
_MOST_SAMPLES = 32  # on which what few samples showed must hold
_LEAST_SAMPLES = 8  # of a model that is not cheap, or of large samples
_TOO_LARGE = 30_000_000  # weights of a model for which more samples would take seconds
_MOST_NUMBERS = 2**20  # of a batch of more than these
_HOLDS = 1e-4  # relative deviation of many samples in fp32 that rounding may cause
_STAYS = 1e-5  # the same of another call


@dataclass(frozen=True)
class Proof:
    """What gradients show: the count that the loss averages over (None: it cannot be split, for the `reason`), and
    `rivals`, other counts that agree with it on all that was seen."""

    count: Count | None
    rivals: tuple[Count, ...] = ()
    reason: str = ""
    deviation: float = 0.0  # of the samples' weighted sum from the whole gradient, relative


class _AlikeError(NothingToCompareError):
    """Samples whose gradients do not tell their weights."""

    def __init__(self) -> None:
        super().__init__(
            "the gradients of the samples at hand are too much alike to tell their weights"
        )


def samples_to_try(setup: Setup, batch: Any) -> int:
    """How many samples `prove` takes as `more`, of such as this batch has; of a large model none that it had not."""
    if _size(setup.model) > _TOO_LARGE:
        return TRIAL_SAMPLES
    samples = sample_count(batch, setup.workload.split)
    numbers = sum(tensor.numel() for tensor in tensors(shortened(batch))) // samples
    wanted = min(_MOST_SAMPLES, _MOST_NUMBERS // max(1, numbers)) if _is_cheap(setup.model) else 0
    return max(_LEAST_SAMPLES, wanted)


def prove(setup: Setup, batch: Any, more: Any = None) -> Proof:
    """Compare the gradient of a batch of a few samples with those of each sample, of two where memory runs out. What
    this shows must hold for `more` samples, since a loss may depend on how many there are, or on some that are rare.

    `setup` is of a copy of the model that nobody else uses: its weights are overwritten.
    """
    samples = sample_count(batch, setup.workload.split)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that do not like a single sample
        try:
            return _held(setup, _proof_of(setup, batch), more)
        except Exception as error:
            if samples <= 2 or not is_out_of_memory(error):
                raise
        return _proof_of(setup, take_samples(batch, [0, 1], setup.workload.split))


def _is_cheap(model: nn.Module) -> bool:
    return _size(model) <= _CHEAP


def _size(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _proof_of(setup: Setup, batch: Any) -> Proof:
    """The proof of the first variation of a batch that the loss takes.

    First comes one with some labels and ends of rows left out, differently in each sample, because what a loss averages
    over shows where samples differ in it; last one whose samples are made to differ, if they are all alike.
    """
    trials = [_Trial(shortened(batch)), _Trial(batch)]
    # on a card a wrong label ends the process
    if setup.device.type == "cpu" and not is_own(setup.workload.split):
        short = shortened(batch)
        # whose `rivals` are watched
        is_mean = setup.workload.count is None and setup.workload.reduction != "sum"
        is_supposed = is_mean and not ignores(batch)
        trials = [
            _Trial(altered(short), is_supposed),
            _Trial(altered(short, ignores_labels=False)),
            *trials,
        ]

    proof, problem = _first_proof(setup, trials)
    if isinstance(problem, _AlikeError):
        proof, _ = _first_proof(setup, [_Trial(diversified(batch, setup.model))])
    if proof:
        return proof
    own = isinstance(problem, NothingToCompareError)
    return Proof(
        None,
        reason=str(problem) if own or problem is None else f"it raised {describe_error(problem)}",
    )


@dataclass(frozen=True)
class _Trial:
    """A batch that a loss is tried on. One that `is_supposed` has labels such as the data do not have: it may tell what
    a loss averages over, but not that it cannot be split, nor that it is a sum of what it takes for numbers."""

    batch: Any
    is_supposed: bool = False


def _first_proof(setup: Setup, trials: Sequence[_Trial]) -> tuple[Proof | None, Exception | None]:
    """The proof of the first batch that gives one, or what prevented that of the last."""
    is_cheap = _is_cheap(setup.model)
    problem: Exception | None = None
    supposed: Proof | None = None
    for trial in trials:
        proof = None
        if is_cheap:
            proof, problem = _attempt(setup, trial.batch, torch.float64)
        if proof is None:
            proof, problem = _attempt(setup, trial.batch, torch.float32)
            if proof and proof.count is None and proof.deviation < _DOUBTFUL:
                proof = _attempt(setup, trial.batch, torch.float64)[0] or proof
        if proof and trial.is_supposed and (proof.count is None or proof.count.kind == "sum"):
            supposed = proof if proof.count else None
        elif proof:
            return _of_both(supposed, proof), None
    return supposed, problem


def _of_both(supposed: Proof | None, proof: Proof) -> Proof:
    """The counts that two proofs agree on; if on none, those of the second."""
    if supposed is None or proof.count is None:
        return proof
    accepted = (proof.count, *proof.rivals)
    common = [
        count
        for count in (supposed.count, *supposed.rivals)
        if count is not None and count in accepted
    ]
    return Proof(common[0], tuple(common[1:]), deviation=proof.deviation) if common else proof


def _attempt(setup: Setup, batch: Any, dtype: torch.dtype) -> tuple[Proof | None, Exception | None]:
    """The proof of one batch in one format, or what prevented it."""
    return _first_of_variations(
        setup, dtype, lambda each: _compare(setup, _as_format(batch, dtype), dtype, each)
    )


def _first_of_variations(
    setup: Setup, dtype: torch.dtype, look: Callable[[VariedOutcomes | None], Found]
) -> tuple[Found | None, Exception | None]:
    """What a look finds with the most varied outcomes that the user's code takes, or what prevented the last one."""
    problem: Exception | None = None
    for varied in (VariedOutcomes(scalars=True), VariedOutcomes(scalars=False), None):
        try:
            with _conditions(setup.model, dtype):
                return look(varied), None
        except Exception as error:  # of code that may not take this batch, format or outcome
            if is_out_of_memory(error):
                raise
            problem = error
    return None, problem


@contextmanager
def _conditions(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Random weights in a format; no lower one inside; attention whose random draws can be seen; ReLU without a kink;
    BatchNorm with fixed statistics, since those of few samples are not those of a batch."""
    default = torch.get_default_dtype()
    autocast = torch.amp.autocast_mode.autocast
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(dtype)
        stack.enter_context(mock.patch.object(autocast, "__enter__", lambda self: self))
        stack.enter_context(mock.patch.object(autocast, "__exit__", lambda *_: None))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(SmoothRelu())  # type: ignore[no-untyped-call]
        # Module.to makes real numbers of complex ones
        model._apply(lambda tensor: _tensor_as(tensor, dtype))
        _draw_weights(model)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        yield


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Random weights that keep activations of the same size in every layer, none of them at a symmetric value."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        weight = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter
        if not weight.is_floating_point():
            continue
        if weight.dim() >= 2:
            wanted = (weight.numel() // weight.shape[0]) ** -0.5
            spread = float(weight.reshape(-1)[:_FEW].std(correction=0))
            is_drawn = abs(spread / DRAWN_DEVIATION - 1) < 0.2  # as probes draw weights
            if is_drawn:  # to draw 100M again takes half a second
                weight.mul_(wanted / DRAWN_DEVIATION)
            else:
                weight.normal_(0.0, wanted, generator=generator)
        else:
            noise = torch.empty_like(weight).normal_(0.0, 0.1, generator=generator)
            weight.add_(noise)


def _as_format(batch: Any, dtype: torch.dtype) -> Any:
    return map_tensors(batch, lambda tensor: _tensor_as(tensor, dtype))


def _tensor_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _compare(setup: Setup, batch: Any, dtype: torch.dtype, varied: VariedOutcomes | None) -> Proof:
    """Whether the gradient of a batch is the weighted sum of its samples', and with which counts as weights."""
    workload = setup.workload
    samples = sample_count(batch, workload.split)
    slices = [take_samples(batch, [sample], workload.split) for sample in range(samples)]
    gradients = SampledGradients(setup, varied)
    calls = CallState(workload.loss, setup.model)
    host = random_state.capture(torch.device("cpu"))

    draws = RecordedDraws(samples)
    with draws:
        whole, _ = gradients.of(batch)
    try:
        parts, own_counts = gradients.of_slices(slices, [1] * samples, draws)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NothingToCompareError(
            f"the loss of a single sample raised {describe_error(error)}"
        ) from error

    if not random_state.is_at(host, torchs=False):
        reason = (
            "it draws random numbers by Python or numpy, which single samples cannot be given again"
        )
        return Proof(None, reason=reason, deviation=1.0)

    def again(order: Sequence[int]) -> float:
        draws.replay(order)
        with draws:
            gradient, _ = gradients.of(take_samples(batch, order, workload.split))
        return _relative(gradient, whole)

    exact = torch.float32 if draws.saw_single_precision else dtype  # code that insists on it
    evidence = _Evidence(workload, batch, slices, whole, parts, own_counts)
    proof = _judge(evidence, _ROUNDING[exact], _ALIKE[exact])
    if not is_own(workload.split) and proof.deviation >= _ROUNDING[exact] / _ROUNDING_FACTOR:
        noise = again([*range(1, samples), 0])
        if noise > _MOST_NOISE[dtype]:
            reason = f"two passes over the same samples gave gradients that differ by {noise:.2g} of their size"
            return Proof(None, reason=reason, deviation=noise)
        proof = _judge(evidence, max(_ROUNDING[exact], _ROUNDING_FACTOR * noise), _ALIKE[exact])

    if proof.count is not None and (moved := calls.moved()):
        calls.advance()
        if (change := again(range(samples))) > _STAYS:
            reason = f"it depends on what earlier calls left in {', '.join(moved)}, and micro-batches are more calls"
            proof = Proof(None, reason=reason, deviation=change)
        calls.restore()
    return proof


def _held(setup: Setup, proof: Proof, more: Any) -> Proof:
    """The proof, as far as it holds for more samples in slices of several. More than there is memory for show nothing.
    In fp32, unless what this shows may be rounding."""
    if (
        proof.count is None
        or more is None
        or sample_count(more, setup.workload.split) <= TRIAL_SAMPLES
    ):
        return proof
    try:
        held = _held_in(setup, proof, more, torch.float32)
        if held.count is None and held.deviation < _DOUBTFUL:
            held = _held_in(setup, proof, more, torch.float64)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return proof
    return held


def _held_in(setup: Setup, proof: Proof, more: Any, dtype: torch.dtype) -> Proof:
    evidence, problem = _first_of_variations(
        setup, dtype, lambda each: _sliced(setup, _as_format(more, dtype), each)
    )
    if evidence is None:
        assert problem is not None
        return Proof(
            None, reason=f"of more samples it raised {describe_error(problem)}", deviation=1.0
        )
    return _held_by(evidence, proof)


def _sliced(setup: Setup, batch: Any, varied: VariedOutcomes | None) -> "_Evidence":
    """The gradients of a batch and of two slices of it, one of them larger."""
    workload = setup.workload
    samples = sample_count(batch, workload.split)
    gradients = SampledGradients(setup, varied)
    draws = RecordedDraws(samples)
    with draws:
        whole, _ = gradients.of(batch)

    slices = list(split(batch, samples * 5 // 8, workload.split))
    sizes = [sample_count(part, workload.split) for part in slices]
    parts, own_counts = gradients.of_slices(slices, sizes, draws)
    return _Evidence(workload, batch, slices, whole, parts, own_counts)


def _held_by(evidence: "_Evidence", proof: Proof) -> Proof:
    assert proof.count is not None, "only a proof is held against more"
    candidates = (proof.count, *proof.rivals)
    holding = [
        count for count in candidates if evidence.deviation(evidence.weights_by(count)) <= _HOLDS
    ]
    if not holding:
        deviation = evidence.deviation(evidence.weights_by(proof.count))
        samples = sample_count(evidence.batch, evidence.workload.split)
        reason = (
            f"what shows on few samples does not hold for {samples}: slices are {deviation:.2g} off"
        )
        return Proof(None, reason=reason, deviation=deviation)
    chosen, *rivals = holding
    return Proof(chosen, tuple(rivals), deviation=proof.deviation)


@dataclass(frozen=True)
class _Evidence:
    """The gradient of a batch and those of its samples, with the counts that a loss of (sum, count) gave itself."""

    workload: Workload
    batch: Any
    slices: Sequence[Any]
    whole: torch.Tensor
    parts: Sequence[torch.Tensor | None]
    own_counts: Sequence[float | None]

    def columns(self) -> torch.Tensor:
        """The gradients of the samples, [coordinates, samples]; zero where there is none."""
        zero = torch.zeros_like(self.whole)
        return torch.stack([zero if part is None else part for part in self.parts], dim=1)

    def deviation(self, weights: torch.Tensor | None) -> float:
        """How far the samples' gradients with these weights are from the whole one, relative."""
        if weights is None:
            return math.inf
        return float((self.columns() @ weights - self.whole).norm() / self.whole.norm())

    def weights_by(self, count: Count | None) -> torch.Tensor | None:
        """The weights by what the workload says of its loss, else by this count."""
        workload = self.workload
        is_sum = workload.reduction == "sum" or (
            workload.count is None and count is not None and count.kind == "sum"
        )
        number_of = workload.count or partial(
            counts.counted, count or counts.SAMPLES, split=workload.split
        )
        return self.weights(number_of, is_sum=is_sum)

    def weights(self, number_of: Callable[[Any], float], *, is_sum: bool) -> torch.Tensor | None:
        """The weight of each sample by a count; None where that cannot be this loss's."""
        numbers = [float(number_of(part)) for part in self.slices]
        if any(number and part is None for number, part in zip(numbers, self.parts, strict=True)):
            return None
        if is_sum:
            return torch.ones(len(numbers), dtype=torch.float64)
        if not sum(numbers):
            return None
        weights = torch.tensor(numbers, dtype=torch.float64) / sum(numbers)
        own: list[float] = [number for number in self.own_counts if number is not None]
        total = math.fsum(own)
        if len(own) == len(numbers) and total:
            given = torch.tensor(own, dtype=torch.float64) / total
            if not torch.allclose(weights, given, rtol=1e-6, atol=1e-9):
                return None
        return weights


def _judge(evidence: _Evidence, tolerance: float, alike: float) -> Proof:
    """The counts whose weights give the whole gradient."""
    workload = evidence.workload
    columns = evidence.columns()
    scale = float(evidence.whole.norm())
    is_present = columns.norm(dim=0) > 0
    present = columns[:, is_present]
    if present.shape[1] < 2:
        raise NothingToCompareError("the loss of most single samples is not a number")
    strengths = torch.linalg.svdvals(present / present.norm(dim=0))
    if float(strengths[1] / strengths[0]) < alike:  # some may be the same sample, but not all
        raise _AlikeError

    found = torch.zeros(len(evidence.slices), dtype=torch.float64)
    solved = torch.linalg.lstsq(present, evidence.whole.unsqueeze(1), rcond=alike, driver="gelsd")
    found[is_present] = solved.solution[:, 0]
    least = float((columns @ found - evidence.whole).norm()) / scale
    if least > tolerance:
        reason = f"no weights of single samples' gradients give that of all: {least:.2g} of it is left over"
        return Proof(None, reason=reason, deviation=least)

    if workload.count is not None or workload.reduction == "sum":
        deviation = evidence.deviation(evidence.weights_by(None))
        if deviation <= max(tolerance, _GIVEN_COUNT):
            return Proof(counts.SAMPLES, deviation=deviation)
        given = "a sum" if workload.reduction == "sum" else "a mean over count="
        shown = ", ".join(f"{weight:.4g}" for weight in found.tolist())
        return Proof(
            None, reason=f"it is not {given}: the weights of its samples are {shown}", deviation=1.0
        )

    accepted: list[tuple[Count, torch.Tensor]] = []
    for count in counts.candidates(evidence.batch):
        weights = evidence.weights_by(count)
        if weights is not None and evidence.deviation(weights) <= tolerance:
            accepted.append((count, weights))
    if not accepted:
        shown = ", ".join(f"{weight:.4g}" for weight in found.tolist())
        reason = f"it weights samples by {shown}, and nothing in the batch counts so"
        return Proof(None, reason=reason, deviation=1.0)
    if not all(
        torch.allclose(weights, accepted[0][1], atol=_SAME_WEIGHT) for _, weights in accepted
    ):
        raise _AlikeError

    default = counts.by_task(workload, evidence.batch)
    chosen = next((count for count, _ in accepted if count == default), accepted[0][0])
    rivals = tuple(count for count, _ in accepted if count != chosen)
    return Proof(chosen, rivals, deviation=evidence.deviation(dict(accepted)[chosen]))


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())
