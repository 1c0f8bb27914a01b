"""One look at a workload before anything is measured: what its model is made of, and whether its loss can be split.

Runs in a probe process. Everything a user's own factories can do wrong comes to light here, as one sentence each.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autofit
from autofit.core.errors import AutofitError, InputError
from autofit.core.hardware import Hardware
from autofit.core.workload import Traits, Workload
from autofit.data.batch import map_tensors, sample_count, weighted_slices
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.setup.blocks import repeated_blocks
from autofit.setup.layers import is_linear
from autofit.training.build import build
from autofit.training.default_loss import check_call
from autofit.training.fingerprint import fingerprint
from autofit.training.meta_model import skeleton_from
from autofit.training.step import compute_loss

_CHECKED_SAMPLES = 4
_KNOWN_TO_SPLIT = ("preset", "directory", "hub")  # transformers models with their own loss
_TOLERANCE = 1e-3  # relative, of the split loss against the unsplit one in fp32
_LOW_PRECISION_TOLERANCE = 3e-2
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(autofit.__file__).parent))  # an error is mended elsewhere


def inspect_workload(workload: Workload, hardware: Hardware, budget_bytes: int) -> Traits:
    """Look at the model's structure and try the loss on a small batch, whole and split.

    The trial needs the weights in fp32; where they would take more than half of the budget it is left out, with a note.

    Raises:
        InputError: a factory raises, the batch or the loss is not what it should be.
    """
    with blamed_on("the model factory"):
        model = skeleton_from(workload.model)
    traits = _replace(_structure(model), fingerprint=_fingerprint(workload, model))
    if workload.source.get("kind") in _KNOWN_TO_SPLIT:
        return traits
    if traits.parameters * 4 <= budget_bytes // 2:
        try:
            splits, sdpa, notes = _try_loss(workload, hardware)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            return _replace(traits, splits=splits, sdpa=sdpa, notes=notes)
    note = "the model is too large to try its loss before the search; it is taken to be a mean over samples."
    return _replace(traits, notes=(note,))


def _replace(traits: Traits, **changes: Any) -> Traits:
    return Traits(**{**traits.__dict__, **changes})


def _structure(model: nn.Module) -> Traits:
    names = [name for name, module in model.named_modules() if is_linear(module)]
    modules = list(model.modules())
    trained = sum(p.requires_grad for p in model.parameters())
    if not trained:
        raise InputError("the model has no trainable parameter.", "Set requires_grad on what should be trained.")
    return Traits(
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=len(repeated_blocks(model)),
        linears=len(names),
        attention=any("attn" in name or "attention" in name for name in names),
        sdpa=bool(getattr(model, "_supports_sdpa", False)),
        batch_norm=any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules),
        dropout=any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in modules),
        head=_has_head(model),
    )


def _fingerprint(workload: Workload, model: nn.Module) -> str | None:
    try:
        return fingerprint(workload, model)
    except Exception:  # it reads the user's code and settings, which may be anything; nothing is measured by it
        return None


def _has_head(model: nn.Module) -> bool:
    get = getattr(model, "get_output_embeddings", None)
    return isinstance(get() if get else None, nn.Linear) and callable(getattr(model, "loss_function", None))


def _try_loss(workload: Workload, hardware: Hardware) -> tuple[bool, bool, tuple[str, ...]]:
    """(whether the loss splits, whether the forward uses fused attention, notes)."""
    samples = min(_CHECKED_SAMPLES, workload.effective_batch_size)
    with blamed_on("the batch factory"):
        batch = workload.batch(samples)
    if sample_count(batch) != samples:
        message = f"the batch factory was asked for {samples} samples and gave {sample_count(batch)}."
        raise InputError(message, "batch(n) must give n samples along dim 0 of every tensor.")
    setup = build(workload, {}, hardware)
    watch = _SdpaWatch()
    try:
        if workload.loss is None:
            check_call(setup.model, batch)
        with watch:
            _evaluated(setup, batch)
        splits, note = loss_splits(setup, batch)
    finally:
        setup.close()
    return splits, watch.seen, (note,) if note else ()


def loss_splits(setup: Setup, batch: Any) -> tuple[bool, str | None]:
    """Whether the loss of a batch is the weighted mean of its slices' losses, and a sentence where that is not plain.

    Tried without dropout and with BatchNorm's stored statistics, on a batch of a few samples.
    """
    samples = sample_count(batch)
    if samples == 1:
        return True, None
    whole, again = _evaluated(setup, batch), _evaluated(setup, batch)
    if not math.isfinite(whole):
        return True, f"the loss is {whole} with random weights, so it was not checked that it can be split."
    if not _close(setup, whole, again):
        return (
            True,
            "the loss draws random numbers, so it was not checked that it can be split: it is taken to be a mean.",
        )
    in_slices = _split_loss(setup, batch)
    if _close(setup, whole, in_slices):
        return True, None
    return False, (
        f"the loss of {samples} samples is {whole:.6g}, but {in_slices:.6g} from their slices: it cannot be split, so "
        "the micro-batch stays the whole batch. If it is a mean over something else than samples, say so with "
        "Workload(count=...)."
    )


def check_loss(setup: Setup) -> None:
    """Try the loss once before training: whole configs of one's own may split what cannot be split.

    Raises:
        InputError: it raises (labels of a wrong shape, say), or cannot be split as the config would.
    """
    whole = setup.workload.effective_batch_size
    if setup.micro_batch_size >= whole:
        _evaluated(setup, setup.workload.batch(1))
        return
    splits, note = loss_splits(setup, setup.workload.batch(min(_CHECKED_SAMPLES, whole)))
    if not splits:
        raise InputError(str(note), f"Set micro_batch_size to {whole}, or leave the config to the search.")


def _evaluated(setup: Setup, batch: Any) -> float:
    was_training = setup.model.training
    setup.model.eval()
    try:
        with blamed_on("the loss"):
            return _loss(setup, batch)
    finally:
        setup.model.train(was_training)


def _loss(setup: Setup, batch: Any) -> float:
    on_device = map_tensors(batch, lambda tensor: tensor.to(setup.device))
    with setup.step_context(), setup.forward_context():
        return float(compute_loss(setup, on_device).detach())


def _split_loss(setup: Setup, batch: Any) -> float:
    """The loss put together from slices of one sample, weighted as the training loop does it."""
    return sum(_evaluated(setup, each) * weight for each, weight in weighted_slices(setup.workload, batch, 1))


def _close(setup: Setup, one: float, other: float) -> bool:
    tolerance = _TOLERANCE if setup.config["precision"] == "fp32" else _LOW_PRECISION_TOLERANCE
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)


class _SdpaWatch(TorchDispatchMode):
    """Notices whether PyTorch's fused attention ran; under it the operator arrives in one of its backend forms."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def blamed_on(what: str, remedy: str = "Correct it there.") -> Iterator[None]:
    """Turn whatever a user's function raises into one sentence that says what raised, its message, and where."""
    try:
        yield
    except AutofitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise  # nobody's mistake
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([each for each in frames if not each.filename.startswith(_LIBRARIES)] or frames)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        message = " ".join(str(error).split()) or "no message"
        raise InputError(f"{what} raised {type(error).__name__}: {message} (at {where}).", remedy) from error
