"""Inspection of a workload before anything is measured: its model's structure, and its loss.

Whether the loss can be split is found by trying. Runs in a probe process. Every mistake in the
user's own factories becomes one sentence here.
"""

import copy
import dataclasses
import functools
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autofit
from autofit.core.config_faults import config_faults_named
from autofit.core.errors import InputError, as_input_error, describe_error
from autofit.core.hardware import Hardware
from autofit.core.tasks import task_of
from autofit.core.tasks.custom import CUSTOM
from autofit.core.workload import Traits, Workload
from autofit.data.batch import few_samples, is_own, sample_count, samples_of
from autofit.data.trial_batches import TRIAL_SAMPLES, most_different, shortened
from autofit.hardware.device import detect
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import RefusedError, Setup
from autofit.setup.adapters import has_adapters
from autofit.setup.deferred_logits import defers_logits
from autofit.setup.experts import expert_weights
from autofit.setup.layers import is_linear, is_quantized, repeated_blocks
from autofit.setup.split_layers import heads_of, planned
from autofit.setup.state import evaluation_mode
from autofit.techniques.lora_rank import adapter_targets
from autofit.training import random_state
from autofit.training.build import build
from autofit.training.call_state import CallState
from autofit.training.default_loss import check_call
from autofit.training.equal_work import prove, samples_to_try
from autofit.training.fingerprint import INSTALLED, fingerprint
from autofit.training.gradient_evidence import Proof
from autofit.training.meta_model import meta_copy, meta_model_from
from autofit.training.model_state import stays_in_eval
from autofit.training.packed_samples import note_of_mixed_samples
from autofit.training.replay import has_representations
from autofit.training.step import loss_value

_SPLITTABLE_SOURCES = ("preset", "directory", "hub")  # transformers models with their own loss
# of each weight: itself in fp32, and as much for activations and the gradients of a few
_BYTES_OF_TRIAL = 8
_MOST_PARAMETERS = 200_000_000  # of a model that is tried whole, since that takes seconds
_LOOKED_AT = 32  # samples among which those that differ most are found
_CORRECT_IT = "Correct it there."
# where the user fixes no errors
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(autofit.__file__).parent))
_COUPLED_BY_ROUTERS = (
    "the loss of the model's routers couples the samples of a batch, so the micro-batch stays the"
    " whole of it."
)
_TOO_LARGE = (
    "the model is too large to prove that its loss can be split, so the micro-batch stays the whole"
    " batch."
)


def inspect_workload(workload: Workload, hardware: Hardware, budget_bytes: int | None) -> Traits:
    """Read the model's structure, and find out whether its loss can be split.

    That, and what the loss averages over, is found by trying. The trial needs weights and gradients
    in fp32: of a model that is too large for that, few of its repeated blocks are tried. Without a
    budget nothing is.
    """
    with blamed_on("the model factory"):
        model = meta_model_from(workload.model)
    traits = _structure(workload, model)
    if budget_bytes is None:
        return traits

    largest = budget_bytes // _BYTES_OF_TRIAL
    is_large = traits.parameters > min(largest, _MOST_PARAMETERS)
    is_named = workload.source.get("kind") in _SPLITTABLE_SOURCES
    # Those of autofit.losses are known, and of representations all gradients are handed on.
    is_own = getattr(workload.loss, "task", None) == workload.task
    if is_own or has_representations(workload.loss):
        return traits
    if workload.loss is None and (is_named or (is_large and task_of(model) is not CUSTOM)):
        # transformers' own losses are known: all are means over what the task says, but for these
        if _has_router_loss(model):
            return _unsplit(traits, _COUPLED_BY_ROUTERS)
        return traits
    if workload.effective_batch_size == 1:
        return traits

    if is_large:
        shallow = functools.partial(_shallow, workload.model)
        workload = dataclasses.replace(workload, model=shallow)
        with suppress(InputError):
            model = meta_model_from(workload.model)
    if sum(weight.numel() for weight in model.parameters()) <= largest:
        try:
            return _with_loss_traits(traits, workload, hardware)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    return _unsplit(traits, _TOO_LARGE)


def _unsplit(traits: Traits, note: str) -> Traits:
    """The traits of a loss that cannot be split, with a note that says why."""
    return dataclasses.replace(traits, splits=False, notes=(*traits.notes, note))


def _has_router_loss(model: nn.Module) -> bool:
    """Whether the loss of a transformers model has a part of its routers.

    That couples all tokens of a batch.
    """
    config = getattr(model, "config", None)
    text_config = getattr(config, "text_config", None)
    return any(getattr(part, "output_router_logits", False) for part in (config, text_config))


def _shallow(factory: Callable[[], Any]) -> nn.Module:
    """The model with the first two of its repeated blocks.

    How a loss averages does not depend on depth.
    """
    model = meta_model_from(factory)
    blocks = repeated_blocks(model)
    if not blocks:
        return model

    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and list(module) == blocks:
            del module[2:]
    return model


def _structure(workload: Workload, model: nn.Module) -> Traits:
    """The traits that the model's structure tells."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            "the model has no trainable parameter.", "Set requires_grad on what should be trained."
        )

    linears = [name for name, module in model.named_modules() if is_linear(module)]
    experts = [weight.module_name.rpartition(".")[2] for weight in expert_weights(model)]

    batch_norm = False
    dropout = False
    keeps_eval = bool(stays_in_eval(model))
    for module in model.modules():
        if keeps_eval and not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            batch_norm = True
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            dropout = True

    digest = None
    # it reads the user's code and settings; measuring does not need it
    with suppress(InputError), as_input_error(describe_error):
        digest = fingerprint(workload, model)

    return Traits(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        blocks=len(repeated_blocks(model)),
        linears=len(linears),
        adapter_parameters=_adapter_parameters(model),
        experts=experts[0] if experts else None,
        attention=any("attn" in name or "attention" in name for name in linears),
        # as models of transformers say it, and where those of diffusers choose among kernels
        sdpa=bool(getattr(model, "_supports_sdpa", hasattr(model, "set_attention_backend"))),
        batch_norm=batch_norm,
        dropout=dropout,
        heads=math.gcd(*heads_of(model)),
        plan=any(True for _ in planned(model)),
        head=defers_logits(model),
        adapters=has_adapters(model),
        quantized=any(map(is_quantized, model.modules())),
        notes=workload.notes,
        fingerprint=digest,
    )


def _adapter_parameters(model: nn.Module) -> int:
    """What LoRA on all linear layers trains for each rank; 0 where that is not known."""
    try:
        names, _experts = adapter_targets(model, "all-linear")
    except RefusedError:
        return 0

    parameters = 0
    for name in names:
        layer: Any = model.get_submodule(name)
        if is_quantized(layer):  # its weight has another shape
            return 0
        parameters += sum(layer.weight.shape)
    return parameters


def _with_loss_traits(traits: Traits, workload: Workload, hardware: Hardware) -> Traits:
    """Whether the loss splits and whether the forward uses fused attention, found by trying."""
    whole = workload.effective_batch_size
    samples = min(TRIAL_SAMPLES, whole)
    with blamed_on("the batch factory"):
        batch = workload.batch(samples)
    given = sample_count(batch, workload.split)
    if given != samples:
        message = f"the batch factory was asked for {samples} samples and gave {given}."
        raise InputError(message, "batch(n) must give n samples along dim 0 of every tensor.")

    setup = build(workload, {}, hardware)
    attention = _FusedAttentionWatch()
    try:
        if workload.loss is None:
            check_call(setup.model, batch)
        with attention:
            try_loss(setup, batch)
        mixed = note_of_mixed_samples(setup, batch)

        trial = getattr(workload.batch, "differing", None)
        if trial is None:
            trial = _few_of(workload, few_samples(workload, min(_LOOKED_AT, whole)))
        more = min(samples_to_try(setup, trial), whole)
        proof = prove(setup, trial, shortened(few_samples(workload, more)))
    finally:
        setup.close()

    notes = traits.notes
    if mixed:
        notes = (*notes, mixed)
    traits = dataclasses.replace(traits, sdpa=attention.ran, notes=notes)
    return _with_proof(traits, workload, proof)


@dataclasses.dataclass(frozen=True)
class Prover:
    """Proves what the loss of a training averages over, on copies of its model.

    The workload's `model` makes one.
    """

    workload: Workload
    hardware: Hardware

    @classmethod
    def of(cls, workload: Workload, model: nn.Module, hardware: Hardware) -> Self:
        """The prover for a model of the user's, which is copied without its weights.

        One that cannot be copied raises InputError when a proof is wanted. Each of several ranks
        proves for itself, as one device.
        """
        try:
            with blamed_on("copying the model's structure"):
                factory = functools.partial(copy.deepcopy, meta_copy(model))
        except InputError as error:
            factory = functools.partial(_raise, error)
        return cls(dataclasses.replace(workload, model=factory), hardware.of_several(1))

    def traits(self) -> Traits:
        """The traits of the workload, with the proof."""
        hardware = self.hardware
        free = hardware.memory_bytes - hardware.used_bytes
        if hardware.device == "cpu":
            free = hardware.host_free_bytes
        with self._calls_undone():
            return inspect_workload(self.workload, hardware, free)

    def on_host(self) -> Self:
        """The same on the host, where a card has no memory left."""
        if self.hardware.device == "cpu":
            return self
        return dataclasses.replace(self, hardware=detect("cpu"))

    def proof(self, batch: Any) -> Proof:
        """What the gradients of a batch show; of its samples those that differ most."""
        workload = self.workload
        with self._calls_undone():
            setup = build(workload, {}, self.hardware)
            samples = sample_count(batch, workload.split)
            samples = min(samples, samples_to_try(setup, batch))
            try:
                more = samples_of(batch, 0, samples, workload.split)
                return prove(setup, _few_of(workload, batch), shortened(more))
            finally:
                setup.close()

    @contextmanager
    def _calls_undone(self) -> Iterator[None]:
        """Undo what calls inside leave in random generators and in the loss."""
        device = torch.device(self.hardware.device)
        with random_state.preserved(device), CallState.preserved(self.workload.loss):
            yield


def _raise(error: InputError) -> nn.Module:
    raise error


def _few_of(workload: Workload, batch: Any) -> Any:
    """A few samples of a batch that differ as much as any."""
    if is_own(workload.split):
        samples = min(TRIAL_SAMPLES, sample_count(batch, workload.split))
        return samples_of(batch, 0, samples, workload.split)
    return most_different(batch, TRIAL_SAMPLES)


def _with_proof(traits: Traits, workload: Workload, proof: Proof) -> Traits:
    """The traits with what a proof found, and a sentence of it where the loss is the user's own."""
    if proof.count is None:
        note = (
            f"the loss cannot be split, so the micro-batch stays the whole batch: {proof.reason}."
            " If it is a mean over something else than samples or labels, say over what with"
            " count=."
        )
        return _unsplit(traits, note)

    if workload.count is not None or workload.reduction == "sum":
        return traits

    notes = traits.notes
    if workload.loss is not None:
        what = f"a mean over {proof.count}"
        if proof.count.kind == "sum":
            what = "a sum over samples"
        notes = (*notes, f"the loss is {what}, as gradients of a few samples show.")
    return dataclasses.replace(traits, count=proof.count, rivals=proof.rivals, notes=notes)


def try_loss(setup: Setup, batch: Any = None) -> None:
    """Try the loss on a sample, and on a few others that are cut short.

    So a mistake in it shows before training. A loss that does not take so few (the largest of ten)
    is tried on a whole batch.
    """
    workload = setup.workload
    whole = workload.effective_batch_size
    if batch is None:
        batch = few_samples(workload, min(TRIAL_SAMPLES, whole))
    samples = sample_count(batch, workload.split)

    # These are calls like any other for a list that the loss logs to.
    calls = CallState.preserved(workload.loss, lists=False)
    with calls, evaluation_mode(setup.model), blamed_on("the loss"):
        try:
            loss_value(setup, samples_of(batch, 0, 1, workload.split))
            if samples > 1:
                others = samples_of(batch, 1, samples, workload.split)
                loss_value(setup, shortened(others))
        except Exception as error:
            if whole == 1 or is_out_of_memory(error) or setup.part is not None:
                raise  # one stage alone must not try again: others would wait for it
            loss_value(setup, workload.batch(whole))


class _FusedAttentionWatch(TorchDispatchMode):
    """Notices PyTorch's fused attention.

    Under dispatch the operator arrives in one of its backend forms.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.ran = self.ran or "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def blamed_on(what: str, remedy: str = _CORRECT_IT) -> Iterator[None]:
    """Turn whatever a user's function raises into a sentence: what raised, the message, and where.

    Where it comes from the config of a model, the sentence is about that.
    """

    def says(error: BaseException) -> str:
        frame, _ = _place_of(error)
        place = f"{frame.filename}:{frame.lineno}"
        return f"{what} raised {describe_error(error)} (at {place})."

    try:
        # running out is nobody's mistake
        with as_input_error(says, remedy, but=is_out_of_memory), config_faults_named():
            yield
    except InputError as error:
        cause = error.__cause__
        if error.remedy == _CORRECT_IT and cause is not None:
            _, is_of_user = _place_of(cause)
            if not is_of_user:
                error.remedy = "That line is a library's: check the batch and the model's config."
        raise


def _place_of(error: BaseException) -> tuple[traceback.FrameSummary, bool]:
    """The innermost line of the user's code, else of a library; and whether it is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    own = [frame for frame in others if not frame.filename.startswith(INSTALLED)]
    return (own or others or frames)[-1], bool(own)
