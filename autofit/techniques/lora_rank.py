"""lora_rank: freeze the weights and train low-rank updates beside them (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import re
import warnings

from torch import nn

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import CLASSIFICATION_TASKS, Workload, task_of
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.layers import is_linear, output_heads


class LoraRank(Technique):
    """0 trains all weights; r > 0 trains two matrices of rank r per target (peft), as lora_alpha and lora_dropout say.

    Ranks have no memory order: beside adamw-8bit, which keeps the state of tensors below 4096 elements in fp32, a
    higher rank can need less (a network of 48 features: 14 % less at rank 86 than at 85).
    """

    name = "lora_rank"
    stage = Stage.ADAPT
    off = 0
    takes = "a whole number from 0 (train all weights) to 1024"

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return (0, 4, 8, 16, 32, 64, 128, 256)

    def accepts(self, value: Value, hardware: Hardware) -> bool:
        return type(value) is int and 0 <= value <= 1024

    def package(self, value: Value) -> str:
        return "peft" if value else "torch"

    def fidelity(self, value: Value) -> int:
        return int(value or 0)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] and not requirements.installed("peft"):
            return "LoRA needs peft, which is not installed; pip install peft, or use lora_rank 0."
        if config[self.name] and workload.traits and not workload.traits.linears:
            return "the model has no linear layers to put adapters beside; use lora_rank 0."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        assert isinstance(value, int), "accepts() lets whole numbers only"
        from peft import LoraConfig, inject_adapter_in_model

        if any(hasattr(module, "lora_A") for module in setup.model.modules()):
            message = "the model has adapters already, of an earlier training"
            raise RefusedError(
                f"{message}: use lora_rank 0 to go on training them, or fold them into the weights first."
            )
        targets = adapter_targets(setup.model, str(setup.config["lora_targets"]))
        on_meta = any(parameter.device.type == "meta" for parameter in setup.model.parameters())
        config = LoraConfig(
            r=value,
            lora_alpha=setup.config["lora_alpha"] or 2 * value,
            lora_dropout=setup.config["lora_dropout"] or 0.0,
            target_modules=_unmistakable(setup.model, targets),
        )
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            # In place, not by get_peft_model: the model keeps its class, so losses that know its attributes still work.
            try:
                inject_adapter_in_model(config, setup.model, low_cpu_mem_usage=on_meta)
            except ValueError as error:  # what peft knows not to work, such as a Mamba's output projection
                reason = " ".join(str(error).split()).partition(". ")[0]
                raise RefusedError(f"peft cannot put adapters here: {reason}; use lora_rank 0.") from error
        # That GPT-2's layers are transposed, peft finds out by itself; nobody has to be told.
        setup.warnings.extend(str(each.message) for each in said if "fan_in_fan_out" not in str(each.message))
        _leave_fast_path(setup.model)
        _train_new_heads(setup)


def _leave_fast_path(model: nn.Module) -> None:
    """PyTorch's encoders evaluate by reading the weights of their layers, past adapters: those with some never do.

    For good, as the adapters stay too: by the attributes in which PyTorch notes whether a module has a fast path.
    """
    for module in model.modules():
        if any(hasattr(part, "lora_A") for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def adapter_targets(model: nn.Module, wanted: str) -> list[str]:
    """Full names of the layers that get adapters.

    `attention`: linear layers inside attention modules; `all-linear`: all but the output head; `all-linear+head`: all.

    Raises:
        RefusedError: the model has none of that kind.
    """
    heads = output_heads(model)
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    if wanted != "all-linear+head" or task_of(model) in CLASSIFICATION_TASKS:  # those are trained whole
        linears = {name: module for name, module in linears.items() if module not in heads}
    if wanted == "attention":
        linears = {name: module for name, module in linears.items() if "attn" in name or "attention" in name}
    if not linears:
        raise RefusedError(f"the model has no linear layers for lora_targets {wanted}; use all-linear, or lora_rank 0.")
    return list(linears)


def _unmistakable(model: nn.Module, targets: list[str]) -> list[str] | str:
    """The names as peft takes them: a list, in which a name also stands for every longer one that ends in it.

    Where that would adapt more than is meant (a layer "0" beside "1.layers.0"), a pattern that names each whole.
    """
    wanted, endings = set(targets), tuple(f".{name}" for name in targets)
    if any(name.endswith(endings) and name not in wanted for name, _ in model.named_modules()):
        return "|".join(re.escape(name) for name in targets)
    return targets


def _train_new_heads(setup: Setup) -> None:
    """A classifier's head starts from random weights: it is trained whole, as peft does for such tasks."""
    if setup.workload.task not in CLASSIFICATION_TASKS:
        return
    for head in output_heads(setup.model):
        head.requires_grad_(True)
