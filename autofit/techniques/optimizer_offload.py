"""optimizer_offload: keep the optimizer's state, and do its step, on the host.

torchao's CPUOffloadOptimizer holds for every weight of at least 4096 elements a pinned copy of it and of its gradient
on the host, and an optimizer of its own there. A hook on the weight copies the gradient over while the backward goes
on; the step waits for each copy, steps the host's weight, and copies it back. The device keeps weights and gradients;
the host pays 16 bytes for a trained fp32 weight.

What matters about it, and what the front below makes good:
- its groups hold the host's weights, one each; the front shows those of the device, and passes learning rates on.
- gradients are copied in the backward, so what changes them afterwards (clipping) would be lost: they are copied again.
- it copies the weights when it is made, and a checkpoint that is loaded later is not seen: the front copies them again.
- loading a state makes new groups in the optimizer of the small weights, while it goes on showing the former ones.
- gradients stay on the device (`offload_gradients` off), because freeing them there would forbid accumulation.
- it keeps no handles of its hooks, so they are found on the weights when they are to be removed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique, requirements
from autofit.setup.host_copies import pinning


class OptimizerOffload(Technique):
    """`cpu`: the state of `adamw` in host memory, stepped by torch's fused AdamW for CPUs."""

    name = "optimizer_offload"
    stage = Stage.STEP  # after `optimizer`, whose groups it takes over
    off = "none"
    values = ("none", "cpu")

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        return ("none",) if hardware.device == "cpu" else self.values

    def package(self, value: Value) -> str:
        return "torch" if value == self.off else "torchao"

    def keeps_on_host(self, value: Value) -> bool:
        return value != self.off

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None
        if hardware.device == "cpu":
            return "on a CPU the state is in the host's memory already, so there is nothing to offload; use none."
        if not requirements.installed("torchao"):
            return "it needs torchao, which is not installed; pip install torchao, or use none."
        if config["optimizer"] != "adamw":
            # Small state has no use in the host's large memory; sgd and adafactor have next to none to offload.
            return f"the step on the host is that of adamw, not of {config['optimizer']}; use optimizer adamw."
        if config["precision"] == "fp16-mixed":
            return "gradients go to the host before the loss scaler of fp16-mixed unscales them; use bf16-mixed."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        from torchao.optim import CPUOffloadOptimizer

        _step_on_host(setup, CPUOffloadOptimizer)

    def trace(self, setup: Setup, value: Value) -> None:
        """By a stand-in for torchao's class, which wants the streams and the pinned memory of a GPU."""
        _step_on_host(setup, functools.partial(_StandIn, note_host=setup.note_host))


def _step_on_host(setup: Setup, kind: Callable[..., Any]) -> None:
    assert setup.optimizer is not None, "the technique `optimizer` comes before"
    clipped = setup.hyperparameters.max_grad_norm is not None
    make = functools.partial(kind, lr=setup.hyperparameters.lr)
    front = SteppedOnHost(setup.optimizer.param_groups, make, gradients_change=clipped)
    setup.on_close(front.remove_hooks)
    setup.optimizer = front
    setup.make_optimizer = None  # another one for weights that this one holds would step them twice


class SteppedOnHost(Optimizer):
    """The front of torchao's CPUOffloadOptimizer: the groups, weights and state as the loop knows them.

    Args:
        groups: as of the plain optimizer.
        make: makes torchao's optimizer of such groups.
        gradients_change: they are changed between backward and step, so the host's copies are stale by then.
    """

    def __init__(self, groups: list[dict[str, Any]], make: Callable[..., Any], *, gradients_change: bool) -> None:
        given = [{key: group[key] for key in ("params", "weight_decay")} for group in groups]
        super().__init__([dict(group) for group in given], {"lr": groups[0]["lr"]})
        self._gradients_change = gradients_change
        with pinning():
            self._inner = make(given, torch.optim.AdamW, fused=True)
        self._on_host: dict[nn.Parameter, torch.Tensor] = self._inner.param_d2h_map
        on_device = {host: device for device, host in self._on_host.items()}
        place = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._place: dict[torch.Tensor, int] = place | {host: place[device] for host, device in on_device.items()}
        self._hooks = {device: next(reversed(_hooks_of(device))) for device in self._on_host}

    def _optimizers(self) -> Iterator[Optimizer]:
        """Those that step: one for each weight on the host, and one for the small ones on the device."""
        yield from self._inner.optim_dict.values()
        if self._inner.d_opt is not None:
            yield self._inner.d_opt

    def step(self, closure: Any = None) -> Any:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                own = self.param_groups[self._place[group["params"][0]]]
                group.update(lr=own["lr"], weight_decay=own["weight_decay"])
        if self._gradients_change:
            for parameter in list(self._inner.queue):
                _hooks_of(parameter)[self._hooks[parameter]](parameter)
        loss = self._inner.step(closure)
        self._show_state()
        return loss

    def _show_state(self) -> None:
        self.state.clear()
        for device, host in self._on_host.items():
            inner = self._inner.optim_dict[device]
            if host in inner.state:
                self.state[device] = inner.state[host]
        if self._inner.d_opt is not None:
            self.state.update(self._inner.d_opt.state)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, and take the weights over that the device holds now."""
        self._inner.load_state_dict(state_dict)
        self._inner.queue.clear()
        with torch.no_grad():
            for device, host in self._on_host.items():
                host.copy_(device)
        self._show_state()

    def remove_hooks(self) -> None:
        """Give the weights back; from here on a backward copies nothing."""
        for parameter, key in self._hooks.items():
            _hooks_of(parameter).pop(key, None)


_SMALLEST = 4096  # elements: CPUOffloadOptimizer's minimal_size


class _StandIn:
    """What of CPUOffloadOptimizer is on the device, on the host, and copied between them, on fake tensors."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kind: type[Optimizer],
        *,
        note_host: Callable[[torch.Tensor], Any],
        **settings: Any,
    ) -> None:
        self._note_host = note_host
        self.param_d2h_map: dict[torch.Tensor, torch.Tensor] = {}
        self.optim_dict: dict[torch.Tensor, Optimizer] = {}
        self.queue: dict[torch.Tensor, None] = {}
        small = []
        for group in groups:
            for weight in group["params"]:
                if weight.numel() < _SMALLEST:
                    small.append({**group, "params": [weight]})
                else:
                    self.optim_dict[weight] = kind([{**group, "params": [self._on_host(weight)]}], **settings)
        self.d_opt = kind(small, **settings) if small else None

    def _on_host(self, weight: torch.Tensor) -> torch.Tensor:
        host = torch.empty_like(weight, requires_grad=False)
        self._note_host(host)
        host.copy_(weight.detach())
        host.grad = torch.empty_like(host)
        self.param_d2h_map[weight] = host
        weight.register_post_accumulate_grad_hook(self._copy_gradient)
        return host

    def _copy_gradient(self, weight: torch.Tensor) -> None:
        host = self.param_d2h_map[weight]
        if weight.grad is not None and host.grad is not None:
            host.grad.copy_(weight.grad)
            self.queue.pop(weight, None)
            self.queue[weight] = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.d_opt is not None:
            self.d_opt.step()
        for weight in (each for each in self.optim_dict if each.grad is not None):  # as there is no queue at first
            optimizer, host = self.optim_dict[weight], self.param_d2h_map[weight]
            optimizer.step()
            self._note_host(optimizer.state[host]["step"])  # made of no other tensor, so nothing else tells where
            weight.copy_(host)
        self.queue.clear()


def _hooks_of(parameter: nn.Parameter) -> dict[int, Callable[[nn.Parameter], None]]:
    """The hooks that run when a gradient is complete, in the order in which they were registered."""
    return parameter._post_accumulate_grad_hooks
