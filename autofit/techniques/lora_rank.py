"""lora_rank: freeze the weights and train low-rank updates beside them (Hu et al. 2021, arXiv 2106.09685)."""

import re
import warnings
from typing import Any

from torch import nn

from autofit.core.workload import CLASSIFICATION_TASKS, task_of
from autofit.setup import Config, Hardware, RefusedError, Setup, Stage, Technique, Value, Workload, requirements
from autofit.setup.layers import is_frozen, is_linear, output_heads


class LoraRank(Technique):
    """0 trains all weights; r > 0 trains two matrices of rank r per target (peft), with lora_alpha and lora_dropout.
    Ranks have no memory order: beside adamw-8bit, which stores the state of tensors below 4096 elements in fp32, a
    higher rank can need less (a network of 48 features: 14 % less at rank 86 than at 85)."""

    name = "lora_rank"
    stage = Stage.ADAPT
    off = 0
    library = "peft"
    takes = "a whole number from 0 (train all weights) to 1024"
    numbers = (0, 1025)

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (0, 4, 8, 16, 32, 64, 128, 256)

    def fidelity(self, value: Value) -> int:
        return int(value or 0)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if not config[self.name]:
            return None
        if lacking := requirements.missing("peft"):
            return f"LoRA needs {lacking}, or use lora_rank 0."
        if workload.traits and not workload.traits.linears:
            return "the model has no linear layers to put adapters beside; use lora_rank 0."
        if workload.traits and workload.traits.linears == 1:  # as in convolutional networks
            return (
                "the model's only linear layer is its head, and an adapter there would learn little; use lora_rank 0."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        assert isinstance(value, int), "accepts() allows whole numbers only"
        from peft import LoraConfig, inject_adapter_in_model

        if any(hasattr(module, "lora_A") for module in setup.model.modules()):
            message = "the model already has adapters from an earlier training"
            raise RefusedError(f"{message}: use lora_rank 0 to train those on, or merge them into the weights first.")
        config = LoraConfig(
            r=value,
            lora_alpha=setup.config["lora_alpha"] or 2 * value,
            lora_dropout=setup.config["lora_dropout"] or 0.0,
            target_modules=_unambiguous(setup.model, adapter_targets(setup.model, str(setup.config["lora_targets"]))),
        )
        on_meta = any(parameter.device.type == "meta" for parameter in setup.model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # In place, not by get_peft_model: the model keeps its class, so losses that use its attributes still work.
            try:
                inject_adapter_in_model(config, setup.model, low_cpu_mem_usage=on_meta)
            except ValueError as error:  # modules that peft rejects, such as a Mamba's output projection
                reason = " ".join(str(error).split()).partition(". ")[0]
                raise RefusedError(f"peft cannot put adapters here: {reason}; use lora_rank 0.") from error
        # peft detects GPT-2's transposed layers by itself; its warning about them needs no action.
        setup.warnings.extend(str(each.message) for each in caught if "fan_in_fan_out" not in str(each.message))
        _leave_fast_path(setup.model)
        if setup.workload.task in CLASSIFICATION_TASKS:
            # A classifier's head starts from random weights: it is trained whole, as peft does for such tasks.
            for head in output_heads(setup.model):
                head.requires_grad_(True)


def _leave_fast_path(model: nn.Module) -> None:
    """Turn off the fast path of PyTorch's encoders, whose evaluation reads layers' weights and bypasses adapters. For
    good, as the adapters stay too; by the attributes in which PyTorch notes whether a module has a fast path."""
    for module in model.modules():
        if any(hasattr(part, "lora_A") for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def adapter_targets(model: nn.Module, targets: str) -> list[str]:
    """Full names of the layers that get adapters. `attention`: linear layers inside attention modules; `all-linear`:
    all but the output head; `all-linear+head`: all. Layers that are frozen beside others that are not get
    none. Raises RefusedError where the model has none of that kind."""
    heads = output_heads(model)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    if targets != "all-linear+head" or task_of(model) in CLASSIFICATION_TASKS:  # whose heads are trained whole
        linears = {name: module for name, module in linears.items() if module not in heads}
    if targets == "attention":
        linears = {name: module for name, module in linears.items() if "attn" in name or "attention" in name}
    trained = {name: module for name, module in linears.items() if not is_frozen(module)}
    linears = trained or linears  # a reference, or a teacher, stays as it is
    forbidden = {ending for ending in map(_ending, linears) if _forbidden(model, ending)}
    linears = {name: module for name, module in linears.items() if _ending(name) not in forbidden}
    if not linears:
        raise RefusedError(f"the model has no linear layers for lora_targets {targets}; use all-linear or lora_rank 0.")
    return list(linears)


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _forbidden(model: nn.Module, ending: str) -> bool:
    """Whether peft takes no adapters beside layers of this name in models of this kind: Mamba's kernels read the weight
    of `out_proj` without a call. Found by trying on a model of that one layer."""
    from peft import LoraConfig, inject_adapter_in_model

    model_of_one: Any = nn.Module()
    model_of_one.layer = nn.Module()
    model_of_one.config = getattr(model, "config", None)
    setattr(model_of_one.layer, ending, nn.Linear(1, 1, device="meta"))  # without values no random number is drawn
    try:
        inject_adapter_in_model(LoraConfig(r=1, target_modules=[ending]), model_of_one, low_cpu_mem_usage=True)
    except ValueError:
        return True
    return False


def _unambiguous(model: nn.Module, targets: list[str]) -> list[str] | str:
    """The names as peft takes them: a list, in which a name also matches every longer one that ends in it. Where that
    would adapt more layers (a layer "0" beside "1.layers.0"), a pattern that matches each name whole."""
    names, endings = set(targets), tuple(f".{name}" for name in targets)
    if any(name.endswith(endings) and name not in names for name, _ in model.named_modules()):
        return "|".join(re.escape(name) for name in targets)
    return targets
