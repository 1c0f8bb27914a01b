"""lora_rank: freeze the weights and train low-rank updates beside them (Hu et al. 2021, arXiv
2106.09685)."""

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autofit.core.errors import describe_error, printable
from autofit.core.knobs.lora_alpha import USUAL_ALPHA
from autofit.core.knobs.lora_rank import KNOB
from autofit.core.tasks import TASKS, task_of
from autofit.setup import (
    Config,
    Hardware,
    RefusedError,
    Setup,
    Stage,
    Technique,
    Value,
    Workload,
    requirements,
)
from autofit.setup.adapters import has_adapters
from autofit.setup.experts import (
    adapts_parameter,
    add_adapters,
    expert_weights,
    nest_in_order,
    reach,
)
from autofit.setup.layers import is_frozen, is_linear, output_heads, tensors_met

# In which attributes PyTorch's encoders note whether they have a fast path.
_FAST_PATHS = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}

_ADAPTED = (
    "the model already has adapters from an earlier training: use lora_rank 0 to train those on, or "
    "merge them into the weights first."
)
_QUANTIZED = (
    "the model's weights came quantised, and its norms and embeddings alone would be trained: use"
    " LoRA (space lora, or lora_rank 16), or load plain weights."
)


class LoraRank(Technique):
    """0 trains all weights; r > 0 trains two matrices of rank r per target (peft), with lora_alpha
    and lora_dropout.

    Ranks have no memory order: beside adamw-8bit, which stores the state of tensors below 4096
    elements in fp32, a higher rank can need less (a network of 48 features: 14 % less at rank 86
    than at 85).
    """

    record = KNOB
    stage = Stage.ADAPT
    library = "peft"

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (0, 4, 8, 16, 32, 64, 128, 256)

    def fidelity(self, value: Value) -> int:
        return int(value or 0)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        traits = workload.traits
        if not config[self.name]:
            if traits and traits.quantized and not traits.adapters and not config.head_only:
                return _QUANTIZED
            return None

        if lacking := requirements.missing("peft"):
            return f"LoRA needs {lacking}, or use lora_rank 0."

        traits = workload.traits
        if traits and traits.adapters:
            return _ADAPTED
        if traits and not traits.linears:
            return "the model has no linear layers to put adapters beside; use lora_rank 0."
        if traits and traits.linears == 1:  # as in convolutional networks
            return (
                "the model's only linear layer is its head, and an "
                "adapter there would learn little; use lora_rank 0."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        assert isinstance(value, int), "accepts() allows whole numbers only"
        from peft import LoraConfig

        if has_adapters(setup.model):
            raise RefusedError(_ADAPTED)

        layers, experts = adapter_targets(setup.model, str(setup.config.lora_targets))
        if experts and setup.config.lora_dropout:
            raise RefusedError(
                "the adapters of experts take no dropout; set lora_dropout 0, or name no experts."
            )

        config = LoraConfig(
            r=value,
            lora_alpha=setup.config.lora_alpha or USUAL_ALPHA,
            lora_dropout=setup.config.lora_dropout or 0.0,
            use_dora=bool(setup.config.lora_dora),
            use_rslora=bool(setup.config.lora_rslora),
            target_modules=_unambiguous(setup.model, layers),
            target_parameters=experts or None,
        )
        _inject(setup, config)

        _leave_fast_path(setup.model)
        setup.forward_contexts.append(functools.partial(_explain, setup.model))
        nest_in_order(setup.model)
        for module in setup.model.modules():
            if adapts_parameter(module):
                add_adapters(module)

        if note := reach(setup.model):
            setup.warnings.append(note)
            setup.tracing.assumptions.append(note)
        if TASKS[setup.workload.task].has_new_head:
            # A classifier's head starts from random weights: it is trained whole, as peft does for
            # such tasks.
            for head in output_heads(setup.model):
                head.requires_grad_(True)


def _inject(setup: Setup, config: Any) -> None:
    """Put peft's adapters into the model, which may still have no weights.

    In place, not by get_peft_model: the model keeps its class, so losses that use its attributes
    still work.
    """
    from peft import inject_adapter_in_model

    on_meta = any(parameter.device.type == "meta" for parameter in setup.model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            inject_adapter_in_model(config, setup.model, low_cpu_mem_usage=on_meta)
        # modules that peft rejects, or models: DAB-DETR
        except (NotImplementedError, ValueError) as error:
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise RefusedError(
                f"peft cannot put adapters here: {reason}; use lora_rank 0."
            ) from error

    # peft detects GPT-2's transposed layers by itself; its warning about them needs no action.
    messages = [str(warning.message) for warning in caught]
    setup.warnings += [message for message in messages if "fan_in_fan_out" not in message]

    if on_meta and setup.config.lora_dora:
        for module in setup.model.modules():
            if getattr(module, "lora_magnitude_vector", None):
                measure = functools.partial(_measure_rows, module)
                setup.weights.on_materialized.append((module, measure))


@torch.no_grad()
def _measure_rows(layer: Any) -> None:
    """Begin DoRA with the lengths that the rows of a weight have, as peft does where the weights
    are there before."""
    (adapter,) = layer.lora_magnitude_vector
    lengths = layer.lora_magnitude_vector[adapter]
    low = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
    weight = layer.get_base_layer().weight.to(low.dtype)
    lengths.weight.copy_(lengths.get_weight_norm(weight, low, layer.scaling[adapter]))


@contextlib.contextmanager
def _explain(model: nn.Module) -> Iterator[None]:
    """Refuse where a model's code goes through all parameters, and meets those of adapters."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        named = model.named_parameters()
        adapters = {id(parameter) for name, parameter in named if "lora_" in name}
        if not any(id(tensor) in adapters for tensor in tensors_met(error)):
            raise
        raise RefusedError(
            "adapters do not fit this model, whose code goes through its parameters "
            f"({describe_error(error)}); use lora_rank 0."
        ) from error


def _leave_fast_path(model: nn.Module) -> None:
    """Turn off the fast path of PyTorch's encoders, whose evaluation reads layers' weights and
    bypasses adapters. For good, as the adapters stay too."""
    for module in model.modules():
        for kind, attribute in _FAST_PATHS.items():
            if not isinstance(module, kind):
                continue
            if any(hasattr(part, "lora_A") for part in module.modules()):
                setattr(module, attribute, 0)


def adapter_targets(model: nn.Module, targets: str) -> tuple[list[str], list[str]]:
    """Full names of the layers, and of the experts' weights, that get adapters.

    `attention`: linear layers inside attention modules; `all-linear`: all but the output head;
    `head`: that one; anything else is a name in the full name of a layer or of experts' weights.
    Layers that are frozen beside others that are not get none unless they are named.

    Raises:
        RefusedError: where the model has no layer of a name, or none at all.
    """
    heads = output_heads(model)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    inner = [name for name, module in linears.items() if module not in heads]
    usable = inner if task_of(model).classifies else list(linears)  # whose heads are trained whole
    experts = [weight.full_name for weight in expert_weights(model)]
    kind = str(getattr(getattr(model, "config", None), "model_type", None))
    usable = [name for name in usable if not _forbidden(kind, _ending(name))]

    of_kinds: set[str] = set()
    named: set[str] = set()
    for part in targets.split("+"):
        if part == "all-linear":
            of_kinds.update(inner)
        elif part == "attention":
            of_kinds.update(name for name in inner if "attn" in name or "attention" in name)
        elif part == "head":
            of_kinds |= set(linears) - set(inner)
        else:
            found = [name for name in (*usable, *experts) if f".{part}." in f".{name}."]
            if not found:
                known = ", ".join(dict.fromkeys(map(_ending, (*usable, *experts))))
                raise RefusedError(
                    f"the model has no layer named {printable(part)} that takes adapters "
                    f"(lora_targets {printable(targets)}); it has {printable(known)}."
                )
            named.update(found)

    of_kinds &= set(usable)
    # a reference, or a teacher, stays as it is
    trained = {name for name in of_kinds if not is_frozen(linears[name])}

    chosen = (trained or of_kinds) | named
    layers = [name for name in usable if name in chosen]
    adapted = [name for name in experts if name in chosen]
    if not layers and not adapted:
        raise RefusedError(
            f"the model has no linear layers for lora_targets {targets}; use all-linear or "
            "lora_rank 0."
        )
    return layers, adapted


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


@functools.cache
def _forbidden(kind: str, ending: str) -> bool:
    """Whether peft takes no adapters beside layers of this name in models of this model_type:
    Mamba's kernels read the weight of `out_proj` without a call. Found by trying on a model of that
    one layer."""
    from peft import LoraConfig, inject_adapter_in_model

    model_of_one: Any = nn.Module()
    model_of_one.layer = nn.Module()
    model_of_one.config = SimpleNamespace(model_type=kind, to_dict=lambda: {"model_type": kind})
    # without values no random number is drawn
    setattr(model_of_one.layer, ending, nn.Linear(1, 1, device="meta"))

    config = LoraConfig(r=1, target_modules=[ending])
    try:
        inject_adapter_in_model(config, model_of_one, low_cpu_mem_usage=True)
    except ValueError:
        return True
    return False


def _unambiguous(model: nn.Module, targets: list[str]) -> list[str] | str:
    """The names as peft takes them: a list, in which a name also matches every longer one that ends
    in it. Where that would adapt more layers (a layer "0" beside "1.layers.0"), a pattern that
    matches each name whole."""
    endings = tuple(f".{name}" for name in targets)
    for name, _ in model.named_modules():
        if name.endswith(endings) and name not in targets:
            return "|".join(map(re.escape, targets))
    return targets
