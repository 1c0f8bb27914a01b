"""optimizer: which implementation turns gradients into updates, and in what precision it stores its
state.

Bytes of state per trained weight, beside fp32 weights: `adamw` 8, `adamw-8bit` and `adamw-fp8`
2.03, `adamw-4bit` 1.06, `lion-8bit` 1.02, `muon` 4 for matrices of blocks, `adafactor` one number
per row and column, `sgd` none. The low formats only store tensors of at least 4096 elements
(torchao: of whole blocks, too); smaller ones have the state of `adamw`, those of bitsandbytes in
fp32.

A bf16 weight has 8 bits of mantissa, so an update of less than 1/512 of it is rounded away, and the
usual ones are smaller. Three optimizers keep them, beside weights and gradients of 2 bytes each:
`adamw-master` steps a copy in fp32 (state 12), `adamw-sr` and `adamw-8bit-sr` round up or down at
random, in proportion (8 and 2.03).
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from autofit.core.errors import as_input_error, describe_error, multiple_losses_error
from autofit.core.knobs.optimizer import COMPILED, KEEP_SMALL_UPDATES, KNOB
from autofit.distributed.kinds import by_kind
from autofit.setup import (
    Config,
    Hardware,
    InputError,
    Setup,
    Stage,
    Technique,
    Value,
    Workload,
    requirements,
)
from autofit.setup.bitsandbytes_optimizers import bitsandbytes_optimizer, paged_stand_in
from autofit.setup.master_weights import MasterWeights
from autofit.setup.muon import MuonBesideAdamW, matrices_of_blocks
from autofit.setup.streamed_blocks import is_whole
from autofit.setup.torchao_optimizers import torchao_adamw, torchao_stand_in

_PAGED = ("paged-adamw", "paged-adamw-8bit")
_BITSANDBYTES = ("adamw-8bit", "lion-8bit", *_PAGED)
_LIBRARY = dict.fromkeys(_BITSANDBYTES, "bitsandbytes") | dict.fromkeys(COMPILED, "torchao")
# First compute capability whose compiler supports float8_e4m3fn; torchao's README names it too.
_ADA = (8, 9)


class Optimizer(Technique):
    """`adamw` (fused), `adamw-foreach`, AdamWs with small state or for bf16 weights, `lion-8bit`
    (steps of one size, by the sign of one moment: at a third to a tenth of AdamW's learning rate;
    Chen et al. 2023, arXiv 2302.06675), `muon` (directions of the blocks' matrices made orthogonal,
    AdamW for all else), `adafactor` and `sgd` (no state).

    bitsandbytes makes `adamw-8bit`, `lion-8bit` and the paged ones, block-wise; those store tensors
    of 100,000 elements and more in managed memory, which moves to the host when the GPU is full.
    torchao makes `adamw-4bit`, `adamw-fp8` and those that round stochastically. null is the
    workload's own optimizer, where it has one.
    """

    record = KNOB
    stage = Stage.STEP
    # torchao's first step compiles for 40 to 50 s on two CPU cores; bitsandbytes does not, for
    # nearly the same bytes.
    cuda_values = (*COMPILED, *_PAGED)
    host_values = paged_values = _PAGED
    compiled_values = COMPILED
    always = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """null where the workload brings an optimizer of its own."""
        if workload.optimizer:
            return None
        return config[self.name] or self.off

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        values = super().choices(hardware)
        if requirements.too_old(hardware, _ADA):
            return tuple(value for value in values if value != "adamw-fp8")
        return values

    def package(self, value: Value) -> str:
        return _LIBRARY.get(str(value), "torch")

    def exact(self, value: Value, workload: Workload) -> bool:
        return value in ("adamw", "adamw-foreach")

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = str(config[self.name])
        library = _LIBRARY.get(value)
        if library and (lacking := requirements.missing(library)):
            return f"{value} needs {lacking}, or use adamw."
        if value in KEEP_SMALL_UPDATES and config.precision not in ("bf16", "fp8"):
            return (
                f"{value} is for bf16 weights, and those of {config.precision} need none of it; "
                "use adamw."
            )
        if value in _PAGED and hardware.device == "cpu":
            return (
                f"{value} moves state from GPU to host, and on a CPU both share one memory; use "
                f"{value.removeprefix('paged-')}."
            )

        if value == "muon":
            return _why_not_muon(config, workload)
        if value == "adamw-fp8" and (lacking := requirements.too_old(hardware, _ADA)):
            return f"{value} needs {lacking}; use adamw-8bit."

        if value not in COMPILED or not hardware.here:
            return None
        if lacking := requirements.no_compiler(hardware.device, "cpu"):
            return f"{value} compiles its step: {lacking}, or use adamw-8bit."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        _make(setup, lambda: _kind(str(value), setup))

    def trace(self, setup: Setup, value: Value) -> None:
        """torchao compiles, and paged state is CUDA's: their stand-ins take the same memory."""
        _make(setup, lambda: _stand_in(str(value), setup) or _kind(str(value), setup))


def _why_not_muon(config: Config, workload: Workload) -> str | None:
    if not is_whole(config):
        return "muon steps the matrices of blocks, which are frozen here; use adamw."
    if config.data_parallel == "fsdp":
        return "muon needs whole matrices, and fsdp divides them; use ddp, or adamw."
    if workload.traits and not workload.traits.blocks:
        return "the model has no repeated blocks whose matrices muon would step; use adamw."
    return None


def _make(setup: Setup, kind: Callable[[], Callable[..., TorchOptimizer]]) -> None:
    """Create the optimizer: the workload's own, or one of this kind.

    Raises:
        InputError: where the workload's function fails, or returns something else.
    """
    own = setup.workload.optimizer
    groups = parameter_groups(setup)
    if not groups:
        raise InputError(
            "the model has no trainable parameter.", "Set requires_grad on what should be trained."
        )

    setup.make_optimizer = own or functools.partial(kind(), lr=setup.hyperparameters.lr)
    failing = as_input_error(
        lambda error: f"the optimizer function raised {describe_error(error)}.", "Correct it."
    )
    with failing if own else nullcontext():
        setup.optimizer = setup.make_optimizer(groups)
    _check(setup.optimizer)


def _check(optimizer: Any) -> None:
    """Raise an InputError for what is no optimizer, or one that the loop cannot step."""
    name = type(optimizer).__name__
    if isinstance(optimizer, list | tuple | dict):
        raise multiple_losses_error(f"the optimizer function returned a {name} of {len(optimizer)}")
    if not isinstance(optimizer, TorchOptimizer):
        raise InputError(
            f"the optimizer function returned a {name}, not an Optimizer.", "Return the optimizer."
        )

    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise InputError(
            f"{name} computes the loss several times a step, which autofit does not do.",
            "Choose an optimizer whose step needs no closure.",
        )


def parameter_groups(setup: Setup) -> list[dict[str, Any]]:
    """Trainable parameters, each once, in groups: weight decay on matrices, none on biases and
    norms. `lr_ratio`: how many times the learning rate of the others a group is trained with."""
    decay = setup.hyperparameters.weight_decay
    ratio = setup.config.lora_plus
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in setup.trainable():
        is_faster = bool(ratio) and "lora_B" in name
        kinds[parameter.dim() < 2, is_faster].append(parameter)

    groups = []
    for (are_vectors, are_faster), parameters in sorted(kinds.items(), key=itemgetter(0)):
        settings: dict[str, Any] = {"weight_decay": 0.0 if are_vectors else decay}
        if are_faster:
            settings["lr"] = setup.hyperparameters.lr * float(ratio or 1)
            settings["lr_ratio"] = ratio
        groups += [{"params": kind, **settings} for kind in by_kind(parameters)]
    return groups


def _kind(value: str, setup: Setup) -> Callable[..., TorchOptimizer]:
    if value in _BITSANDBYTES:
        return bitsandbytes_optimizer(value)
    if value in COMPILED:
        return torchao_adamw(value)
    if value == "muon":
        return functools.partial(MuonBesideAdamW, matrices=matrices_of_blocks(setup.model))
    kinds: dict[str, Callable[..., TorchOptimizer]] = {
        "adamw": functools.partial(torch.optim.AdamW, fused=True),
        "adamw-foreach": functools.partial(torch.optim.AdamW, foreach=True),
        "adamw-master": MasterWeights,
        # A step of Adafactor is lr x max(eps[1], the weight's root mean square): with torch's
        # eps[1] of 0.001 an lr chosen for AdamW moves weights of 0.02 fifty times too slowly. With
        # 1, lr means the same as in AdamW. eps[0], squared, is the least variance: torch's is the
        # format's (bf16: 6e-5, above most gradients'); this is the least whose square bf16 and fp32
        # still tell from 0.
        "adafactor": functools.partial(torch.optim.Adafactor, eps=(1e-15, 1.0)),
        "sgd": torch.optim.SGD,
    }
    return kinds[value]


def _stand_in(value: str, setup: Setup) -> Callable[..., TorchOptimizer] | None:
    """Takes the memory of an optimizer that cannot run on fake tensors, or not as it would on the
    target."""
    if value in COMPILED:
        return torchao_stand_in(value, setup)
    if value in _PAGED:
        return paged_stand_in(value, setup)
    if value == "sgd" and setup.hardware.device == "cuda":
        return functools.partial(torch.optim.SGD, foreach=True)  # CUDA's default; a CPU's is a loop
    return None
