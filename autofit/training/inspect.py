"""Inspection of a workload before anything is measured: the model's structure, and whether its loss can be split. Runs
in a probe process. Every mistake in the user's own factories becomes one sentence here."""

import dataclasses
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autofit
from autofit.core.errors import InputError, reported, told
from autofit.core.hardware import Hardware
from autofit.core.workload import Traits, Workload
from autofit.data.batch import counted_slices, few_samples, sample_count, weight_of
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.setup.adapters import has_adapters
from autofit.setup.deferred_logits import defers_logits
from autofit.setup.experts import expert_weights
from autofit.setup.layers import is_linear, repeated_blocks
from autofit.setup.split_layers import heads_of, planned
from autofit.setup.state import evaluation_mode
from autofit.training.build import build
from autofit.training.default_loss import check_call
from autofit.training.fingerprint import fingerprint
from autofit.training.meta_model import meta_model_from
from autofit.training.step import loss_value

_CHECKED_SAMPLES = 4
_SPLITTABLE_SOURCES = ("preset", "directory", "hub")  # transformers models with their own loss
_TOLERANCE = 1e-3  # relative, of the split loss against the unsplit one in fp32
_LOW_PRECISION_TOLERANCE = 3e-2
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(autofit.__file__).parent))  # where the user fixes no errors


def inspect_workload(workload: Workload, hardware: Hardware, budget_bytes: int | None) -> Traits:
    """Read the model's structure and try the loss on a small batch, whole and split. The trial needs the weights in
    fp32; it is skipped, with a note, where they would take more than half of the budget, and without a budget."""
    with blamed_on("the model factory"):
        model = meta_model_from(workload.model)
    traits = _structure(workload, model)
    own_loss = workload.source.get("kind") in _SPLITTABLE_SOURCES and workload.loss is None
    if budget_bytes is None or own_loss:
        return traits
    if traits.parameters * 4 <= budget_bytes // 2:
        try:
            return _with_loss_traits(traits, workload, hardware)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    note = "the model is too large to try its loss before the search; it is taken to be a mean over samples."
    return dataclasses.replace(traits, notes=(*traits.notes, note))


def _structure(workload: Workload, model: nn.Module) -> Traits:
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    modules = list(model.modules())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the model has no trainable parameter.", "Set requires_grad on what should be trained.")
    digest = None
    with suppress(InputError), reported(told):  # it reads the user's code and settings; measuring does not need it
        digest = fingerprint(workload, model)
    return Traits(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        blocks=len(repeated_blocks(model)),
        linears=len(linears),
        experts=next((weight.module_name.rpartition(".")[2] for weight in expert_weights(model)), None),
        attention=any("attn" in name or "attention" in name for name in linears),
        sdpa=bool(getattr(model, "_supports_sdpa", False)),
        batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules),
        dropout=any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in modules),
        heads=math.gcd(*heads_of(model)),
        plan=any(True for _ in planned(model)),
        head=defers_logits(model),
        adapters=has_adapters(model),
        notes=workload.notes,
        fingerprint=digest,
    )


def _with_loss_traits(traits: Traits, workload: Workload, hardware: Hardware) -> Traits:
    """Whether the loss splits and whether the forward uses fused attention, found by trying."""
    samples = min(_CHECKED_SAMPLES, workload.effective_batch_size)
    with blamed_on("the batch factory"):
        batch = workload.batch(samples)
    if (given := sample_count(batch, workload.split)) != samples:
        message = f"the batch factory was asked for {samples} samples and gave {given}."
        raise InputError(message, "batch(n) must give n samples along dim 0 of every tensor.")
    batch = few_samples(workload, samples, batch)
    setup = build(workload, {}, hardware)
    attention = _FusedAttentionWatch()
    try:
        if workload.loss is None:
            check_call(setup.model, batch)
        with attention:
            _tried_loss(setup, batch)
        splits, note = loss_splits(setup, batch)
    finally:
        setup.close()
    notes = (*traits.notes, note) if note else traits.notes
    return dataclasses.replace(traits, splits=splits, sdpa=attention.ran, notes=notes)


def loss_splits(setup: Setup, batch: Any) -> tuple[bool, str | None]:
    """Whether the loss of a batch is the weighted mean of its slices' losses, with a sentence where that is unclear.
    Tried without dropout and with BatchNorm's stored statistics, on a batch of a few samples."""

    def is_close(one: float, other: float) -> bool:
        tolerance = _TOLERANCE if setup.config["precision"] == "fp32" else _LOW_PRECISION_TOLERANCE
        return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)

    samples = sample_count(batch, setup.workload.split)
    if samples == 1:
        return True, None
    whole, again = _tried_loss(setup, batch), _tried_loss(setup, batch)
    if not math.isfinite(whole):
        return True, f"the loss is {whole} with random weights, so it was not checked that it can be split."
    if not is_close(whole, again):
        note = "the loss draws random numbers, so it was not checked that it can be split: it is taken to be a mean."
        return True, note
    slices = counted_slices(setup.workload, batch, 1)
    total = sum(count for _, count in slices)
    sliced = sum(_tried_loss(setup, part) * weight_of(setup.workload, count, total) for part, count in slices)
    if is_close(whole, sliced):
        return True, None
    return False, (
        f"the loss of {samples} samples is {whole:.6g}, but {sliced:.6g} from their slices: it cannot be split, so "
        "the micro-batch stays the whole batch. If it is a mean over something else than samples, say so with "
        "Workload(count=...)."
    )


def check_loss(setup: Setup) -> None:
    """Try the loss once before training: a config given by hand may split what cannot be split."""
    whole = setup.workload.effective_batch_size
    if setup.micro_batch_size >= whole:
        _tried_loss(setup, setup.workload.batch(1))
        return
    splits, note = loss_splits(setup, few_samples(setup.workload, _CHECKED_SAMPLES))
    if not splits:
        remedy = f"Set micro_batch_size to {whole}, or leave the config to the search."
        raise InputError(str(note), "Train on one device." if setup.ranks.layout.samplers > 1 else remedy)


def _tried_loss(setup: Setup, batch: Any) -> float:
    with evaluation_mode(setup.model), blamed_on("the loss"):
        return loss_value(setup, batch)


class _FusedAttentionWatch(TorchDispatchMode):
    """Notices PyTorch's fused attention; under dispatch the operator arrives in one of its backend forms."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ran = self.ran or "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


def blamed_on(what: str, remedy: str = "Correct it there.") -> AbstractContextManager[None]:
    """Turn whatever a user's function raises into one sentence: what raised, its message, and where."""

    def says(error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([each for each in frames if not each.filename.startswith(_LIBRARIES)] or frames)[-1]
        return f"{what} raised {told(error)} (at {frame.filename}:{frame.lineno})."

    return reported(says, remedy, but=is_out_of_memory)  # which is nobody's mistake
