"""bitsandbytes' optimizers, adapted: with overrides of their own, over weights that ranks divide,
with state in pages; and what stands in for paged state under fake tensors."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from autofit.core.errors import InputError
from autofit.setup.state import Setup

_CLASSES = {
    "adamw-8bit": "AdamW8bit",
    "lion-8bit": "Lion8bit",
    "paged-adamw": "PagedAdamW",
    "paged-adamw-8bit": "PagedAdamW8bit",
}
_PAGED = 100_000  # elements: bitsandbytes, optim/optimizer.py, get_state_buffer


def bitsandbytes_optimizer(value: str) -> Callable[..., Optimizer]:
    """What makes the optimizer of this name for groups of parameters."""
    return _made_alike(_adapted(_CLASSES[value]))


@functools.cache
def _adapted(name: str) -> type[Optimizer]:
    from bitsandbytes import optim

    bases: list[Any] = [_OverShards]
    if name.startswith("Paged"):
        bases.append(_Paged)
    bases.append(getattr(optim, name))
    return type(name, tuple(bases), {})


def paged_stand_in(value: str, setup: Setup) -> Callable[..., Optimizer]:
    """The same optimizer without pages, whose larger state counts as the host's: CUDA's managed
    memory does not come from the device's allocator, and moves to the host when the device is
    full."""
    from bitsandbytes import optim

    plain: Any = getattr(optim, _CLASSES[value].removeprefix("Paged"))

    class StandIn(_OverShards, plain):  # type: ignore[misc]
        def get_state_buffer(
            self, p: torch.Tensor, dtype: torch.dtype = torch.float32
        ) -> torch.Tensor:
            buffer = torch.zeros_like(p, dtype=dtype)
            if p.numel() >= _PAGED:
                setup.tracing.note_host(buffer)
            return buffer

    return _made_alike(StandIn)


def _made_alike(optimizer: type[Optimizer]) -> Callable[..., Optimizer]:
    """What makes optimizers of one model: trained in its backward, it has one for every weight.

    They share the levels that 8-bit state may have. Of bitsandbytes' process-wide overrides they
    keep those of modules alone: Trainer has embeddings keep 32-bit state; bitsandbytes remembers
    that by position in the parameter groups, and would apply it to every later optimizer of the
    process, which was not measured so.
    """
    shared: dict[str, torch.Tensor] = {}

    def fill_qmap(self: Any) -> None:
        if not shared:
            shared["dynamic"] = torch.tensor(_levels(signed=True))
            shared["udynamic"] = torch.tensor(_levels(signed=False))

        self.name2qmap = shared

    sharing = type(optimizer.__name__, (optimizer,), {"fill_qmap": fill_qmap})

    def make(*arguments: Any, **options: Any) -> Optimizer:
        made: Any = sharing(*arguments, **options)
        modules = made.mng.module_weight_config_triple

        made.mng = object.__new__(type(made.mng))
        made.mng.initialize()
        made.mng.module_weight_config_triple = modules
        return made  # type: ignore[no-any-return]

    return make


@functools.cache
def _levels(*, signed: bool) -> tuple[float, ...]:
    """The numbers that 8-bit state may have, found on real tensors also among fake ones."""
    from bitsandbytes import functional

    with _disable_current_modes():
        return tuple(functional.create_dynamic_map(signed=signed).tolist())


class _OverShards(Optimizer):
    """Adapts bitsandbytes' optimizers, whose kernels know no DTensors, to weights that ranks
    divide.

    Each rank steps its part, as a plain tensor in the same storage. State is found by the model's
    parameters, and is of that part.
    """

    def step(self, closure: Any = None) -> Any:
        theirs: Any = self
        if not theirs.initialized:
            theirs.check_overrides()  # which it finds by parameter, and keeps by position
        with self._in_parts():
            return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._in_parts():
            super().load_state_dict(state_dict)

            for part, state in self.state.items():
                found = state["state1"].numel()
                if found != part.numel():
                    raise InputError(
                        f"the saved state of {found} elements is not of this rank's part of "
                        f"{part.numel()}.",
                        "Go on with as many devices as before, or with optimizer adamw.",
                    )

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        """Have groups and state be those of this rank's parts of weights."""
        given = [group["params"] for group in self.param_groups]
        parts = {}
        for parameters in given:
            for parameter in parameters:
                if isinstance(parameter, DTensor):
                    parts[parameter] = _part(parameter)

        self._rename(parts)
        for group, parameters in zip(self.param_groups, given, strict=True):
            group["params"] = [parts.get(parameter, parameter) for parameter in parameters]

        try:
            yield
        finally:
            for group, parameters in zip(self.param_groups, given, strict=True):
                group["params"] = parameters
            self._rename({part: parameter for parameter, part in parts.items()})

    def _rename(self, parameters: dict[Any, Any]) -> None:
        """Move state from old keys to new ones."""
        for old, new in parameters.items():
            if old in self.state:
                self.state[new] = self.state.pop(old)


def _part(parameter: DTensor) -> nn.Parameter:
    """This rank's part of a weight; without a gradient where it has no elements, which kernels do
    not expect."""
    part = nn.Parameter(parameter.detach().to_local())
    if parameter.grad is not None and part.numel():
        part.grad = parameter.grad.to_local()
    return part


class _Paged(Optimizer):
    """Adapts bitsandbytes' paged optimizers, which load a checkpoint's state into plain device
    memory."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        theirs: Any = self
        super().load_state_dict(state_dict, move_to_device=False)  # type: ignore[call-arg]
        theirs.initialized = False  # the next step moves small state to the device

        for parameter, state in self.state.items():
            for key in ("state1", "state2"):
                pages = theirs.get_state_buffer(parameter, dtype=state[key].dtype)
                state[key] = pages.copy_(state[key])
