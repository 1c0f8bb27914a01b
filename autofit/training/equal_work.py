"""Proof that micro-batches train what the whole batch trains, and what a loss averages over.

The gradient of a few samples together is compared with the gradients of each of them alone
(`gradient_evidence`). Where the first is no weighted sum of the others, or no count of the batch
has its weights, the loss cannot be split.

Gradients show this whatever the values of weights. The loss alone does not: with a head of zeros
that of every sample is the same. So the proof is of a copy with random weights, in fp64 where that
is cheap, else in fp32.
"""

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
from autofit.data.batch import is_own, map_tensors, sample_count, split, take_samples, tensors
from autofit.data.trial_batches import TRIAL_SAMPLES, altered, diversified, ignores, shortened
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.training import random_state
from autofit.training.call_state import CallState
from autofit.training.gradient_evidence import (
    AlikeError,
    Evidence,
    Proof,
    held_by,
    judge,
    relative_difference,
)
from autofit.training.meta_model import DRAWN_DEVIATION
from autofit.training.recorded_draws import RecordedDraws
from autofit.training.sampled_gradients import NothingToCompareError, SampledGradients
from autofit.training.smooth_relu import SmoothRelu
from autofit.training.varied_outcomes import VariedOutcomes

Found = TypeVar("Found")

_CHEAP = 4_000_000  # weights of a model that is tried in fp64
_FEW = 2048  # numbers of a weight that tell how it was drawn
# Relative deviations that rounding may cause: at least, and in proportion to what another order of
# the samples causes.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 2e-5}
_ROUNDING_FACTOR = 10.0
# of another order; with more a loss is not the same twice
_MOST_NOISE = {torch.float64: 1e-5, torch.float32: 1e-4}
_DOUBTFUL = 1e-2  # a deviation in fp32 that may still be rounding, so that fp64 decides
# second by largest singular value of gradients that tell nothing
_ALIKE = {torch.float64: 1e-7, torch.float32: 1e-3}
_MOST_SAMPLES = 32  # on which what few samples showed must hold
_LEAST_SAMPLES = 8  # of a model that is not cheap, or of large samples
_TOO_LARGE = 30_000_000  # weights of a model for which more samples would take seconds
_MOST_NUMBERS = 2**20  # of a batch of more than these
_STAYS = 1e-5  # relative deviation of another call in fp32 that rounding may cause


def samples_to_try(setup: Setup, batch: Any) -> int:
    """How many samples `prove` takes as `more`, of such as this batch has.

    Of a large model none that the few samples do not have.
    """
    if _size(setup.model) > _TOO_LARGE:
        return TRIAL_SAMPLES
    if _size(setup.model) > _CHEAP:
        return _LEAST_SAMPLES

    samples = sample_count(batch, setup.workload.split)
    numbers = sum(tensor.numel() for tensor in tensors(shortened(batch))) // samples
    wanted = min(_MOST_SAMPLES, _MOST_NUMBERS // max(1, numbers))

    return max(_LEAST_SAMPLES, wanted)


def prove(setup: Setup, batch: Any, more: Any = None) -> Proof:
    """Compare the gradient of a batch of a few samples with those of each sample.

    Where memory runs out, of two samples. What this shows must hold for `more` samples, since a
    loss may depend on how many there are, or on some that are rare.

    `setup` is of a copy of the model that nobody else uses: its weights are overwritten.
    """
    cut = setup.workload.split
    samples = sample_count(batch, cut)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of functions that do not like a single sample
        try:
            return _held(
                setup,
                _proof_of(setup, batch),
                more,
            )
        except Exception as error:
            if samples <= 2 or not is_out_of_memory(error):
                raise

        return _proof_of(setup, take_samples(batch, [0, 1], cut))


def _size(model: nn.Module) -> int:
    """The number of weights."""
    return sum(weight.numel() for weight in model.parameters())


@dataclass(frozen=True)
class _Trial:
    """A batch that a loss is tried on.

    One that `is_supposed` has labels such as the data do not have: it may tell what a loss averages
    over, but not that it cannot be split, nor that it is a sum of what it takes for numbers.
    """

    batch: Any
    is_supposed: bool = False


def _proof_of(setup: Setup, batch: Any) -> Proof:
    """The proof of the first variation of a batch that the loss takes.

    First comes one with some labels and ends of rows left out, differently in each sample, because
    what a loss averages over shows where samples differ in it; last one whose samples are made to
    differ, if they are all alike.
    """
    workload = setup.workload
    short = shortened(batch)
    trials = [_Trial(short), _Trial(batch)]

    # on a card a wrong label ends the process
    if setup.device.type == "cpu" and not is_own(workload.split):
        # what such a loss averages over is checked again while it trains
        is_mean = workload.count is None and workload.reduction != "sum"
        is_supposed = is_mean and not ignores(batch)
        trials = [
            _Trial(altered(short), is_supposed),
            _Trial(altered(short, ignores_labels=False)),
            *trials,
        ]

    proof, problem = _first_proof(setup, trials)
    if isinstance(problem, AlikeError):
        trial = _Trial(diversified(batch, setup.model))
        proof, _ = _first_proof(setup, [trial])

    if proof:
        return proof

    reason = str(problem)
    if problem is not None and not isinstance(problem, NothingToCompareError):
        reason = f"it raised {describe_error(problem)}"

    return Proof(None, reason=reason)


def _first_proof(setup: Setup, trials: Sequence[_Trial]) -> tuple[Proof | None, Exception | None]:
    """The proof of the first batch that gives one, or what prevented that of the last."""
    is_cheap = _size(setup.model) <= _CHEAP
    problem: Exception | None = None
    supposed: Proof | None = None
    for trial in trials:
        proof = None
        if is_cheap:
            proof, problem = _attempt(setup, trial.batch, torch.float64)
        if proof is None:
            proof, problem = _attempt(setup, trial.batch, torch.float32)
            if proof and _is_doubtful(proof):
                exact, _ = _attempt(setup, trial.batch, torch.float64)
                proof = exact or proof

        if proof is None:
            continue

        is_mean = proof.count is not None and proof.count.kind != "sum"
        if is_mean or not trial.is_supposed:
            return _of_both(supposed, proof), None

        supposed = proof if proof.count else None

    return supposed, problem


def _is_doubtful(proof: Proof) -> bool:
    """Whether rounding in fp32 may be why it says that the loss cannot be split."""
    return proof.count is None and proof.deviation < _DOUBTFUL


def _of_both(supposed: Proof | None, proof: Proof) -> Proof:
    """The counts that two proofs agree on; if on none, those of the second."""
    if supposed is None or proof.count is None:
        return proof

    accepted = (proof.count, *proof.rivals)
    candidates = (supposed.count, *supposed.rivals)
    common = [count for count in candidates if count and count in accepted]
    if not common:
        return proof

    chosen, *rivals = common
    return Proof(
        chosen,
        tuple(rivals),
        deviation=proof.deviation,
    )


def _attempt(setup: Setup, batch: Any, dtype: torch.dtype) -> tuple[Proof | None, Exception | None]:
    """The proof of one batch in one format, or what prevented it."""
    return _first_of_variations(
        setup,
        batch,
        dtype,
        partial(_compare, dtype=dtype),
    )


def _first_of_variations(
    setup: Setup,
    batch: Any,
    dtype: torch.dtype,
    compute: Callable[[Setup, Any, VariedOutcomes | None], Found],
) -> tuple[Found | None, Exception | None]:
    """What is computed with the most varied outcomes that the user's code takes.

    Or what prevented it with the last ones.
    """
    problem: Exception | None = None
    for varied in (VariedOutcomes(scalars=True), VariedOutcomes(scalars=False), None):
        try:
            with _conditions(setup.all_models(), dtype):
                formatted = map_tensors(batch, partial(_in_format, dtype=dtype))
                return compute(setup, formatted, varied), None
        except Exception as error:  # of code that may not take this batch, format or outcome
            if is_out_of_memory(error):
                raise

            problem = error

    return None, problem


@contextmanager
def _conditions(models: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """The conditions of a comparison.

    Random weights in a format; no lower one inside; attention whose random draws can be seen; ReLU
    without a kink; BatchNorm with fixed statistics, since those of few samples are not those of a
    batch.
    """
    default = torch.get_default_dtype()
    autocast = torch.amp.autocast_mode.autocast
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(dtype)
        stack.enter_context(
            mock.patch.object(
                autocast,
                "__enter__",
                lambda self: self,
            )
        )

        stack.enter_context(
            mock.patch.object(
                autocast,
                "__exit__",
                lambda *_: None,
            )
        )
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(SmoothRelu())  # type: ignore[no-untyped-call]

        for model in models:
            # Module.to makes real numbers of complex ones
            model._apply(partial(_in_format, dtype=dtype))
            _draw_weights(model)
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()

        yield


def _in_format(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of real or complex numbers in a format; others stay as they are."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    if tensor.is_floating_point():
        return tensor.to(dtype)

    return tensor


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Random weights that keep activations of the same size in every layer.

    None of them is at a symmetric value.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        weight: torch.Tensor = parameter
        if parameter.is_complex():
            weight = torch.view_as_real(parameter.data)
        if not weight.is_floating_point():
            continue

        if weight.dim() < 2:
            noise = torch.empty_like(weight).normal_(0.0, 0.1, generator=generator)
            weight.add_(noise)
            continue

        wanted = (weight.numel() // weight.shape[0]) ** -0.5
        spread = float(weight.reshape(-1)[:_FEW].std(correction=0))
        is_drawn = abs(spread / DRAWN_DEVIATION - 1) < 0.2  # as probes draw weights
        if is_drawn:  # to draw 100M again takes half a second
            weight.mul_(wanted / DRAWN_DEVIATION)
        else:
            weight.normal_(0.0, wanted, generator=generator)


def _compare(
    setup: Setup,
    batch: Any,
    varied: VariedOutcomes | None,
    dtype: torch.dtype,
) -> Proof:
    """Whether the gradient of a batch is a weighted sum of its samples', and by which counts."""
    workload = setup.workload
    cut = workload.split
    samples = sample_count(batch, cut)
    slices = [take_samples(batch, [sample], cut) for sample in range(samples)]
    gradients = SampledGradients(setup, varied)
    calls = CallState(workload.loss, setup.model)
    host = random_state.capture(torch.device("cpu"))

    draws = RecordedDraws(samples)
    with draws:
        whole, _ = gradients.of(batch)

    try:
        parts, own_counts = gradients.of_slices(
            slices,
            [1] * samples,
            draws,
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise

        message = f"the loss of a single sample raised {describe_error(error)}"
        raise NothingToCompareError(message) from error

    if not random_state.is_at(host, torchs=False):
        reason = (
            "it draws random numbers by Python or numpy, which single samples cannot be given again"
        )
        return Proof(None, reason=reason, deviation=1.0)

    def deviation_of_another_pass(order: Sequence[int]) -> float:
        """How far the gradient of the samples in another order is from the first one."""
        draws.replay(order)
        with draws:
            gradient, _ = gradients.of(take_samples(batch, order, cut))

        return relative_difference(gradient, whole)

    exact = torch.float32 if draws.saw_single_precision else dtype  # code that insists on it
    rounding = _ROUNDING[exact]
    alike = _ALIKE[exact]

    evidence = Evidence(
        workload,
        batch,
        slices,
        whole,
        parts,
        own_counts,
    )

    proof = judge(evidence, rounding, alike)

    # Another order of the samples shows how much rounding deviates here.
    if not is_own(cut) and proof.deviation >= rounding / _ROUNDING_FACTOR:
        noise = deviation_of_another_pass([*range(1, samples), 0])
        if noise > _MOST_NOISE[dtype]:
            reason = (
                "two passes over the same samples gave gradients that differ by"
                f" {noise:.2g} of their size"
            )
            return Proof(None, reason=reason, deviation=noise)

        proof = judge(
            evidence,
            max(rounding, _ROUNDING_FACTOR * noise),
            alike,
        )

    # Micro-batches are more calls than the whole batch is.
    moved = calls.moved()
    if proof.count is not None and moved:
        calls.advance()
        change = deviation_of_another_pass(range(samples))
        if change > _STAYS:
            reason = (
                f"it depends on what earlier calls left in {', '.join(moved)},"
                " and micro-batches are more calls"
            )
            proof = Proof(None, reason=reason, deviation=change)

        calls.restore()

    return proof


def _held(setup: Setup, proof: Proof, more: Any) -> Proof:
    """The proof, as far as it holds for more samples in slices of several.

    More than there is memory for show nothing. In fp32, unless what this shows may be rounding.
    """
    if proof.count is None or more is None:
        return proof
    if sample_count(more, setup.workload.split) <= TRIAL_SAMPLES:
        return proof

    try:
        held = _held_in(setup, proof, more, torch.float32)
        if _is_doubtful(held):
            held = _held_in(setup, proof, more, torch.float64)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return proof

    return held


def _held_in(
    setup: Setup,
    proof: Proof,
    more: Any,
    dtype: torch.dtype,
) -> Proof:
    """The proof, as far as it holds for more samples in one format."""
    evidence, problem = _first_of_variations(setup, more, dtype, _of_two_slices)
    if evidence is not None:
        return held_by(evidence, proof)

    assert problem is not None
    reason = f"of more samples it raised {describe_error(problem)}"
    return Proof(None, reason=reason, deviation=1.0)


def _of_two_slices(setup: Setup, batch: Any, varied: VariedOutcomes | None) -> Evidence:
    """The gradients of a batch and of two slices of it, one of them larger."""
    workload = setup.workload
    samples = sample_count(batch, workload.split)
    gradients = SampledGradients(setup, varied)
    draws = RecordedDraws(samples)
    with draws:
        whole, _ = gradients.of(batch)

    slices = list(
        split(
            batch,
            samples * 5 // 8,
            workload.split,
        )
    )
    sizes = [sample_count(part, workload.split) for part in slices]
    parts, own_counts = gradients.of_slices(slices, sizes, draws)

    return Evidence(
        workload,
        batch,
        slices,
        whole,
        parts,
        own_counts,
    )
