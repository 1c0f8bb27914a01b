"""optimizer_offload: store the optimizer's state, and run its step, on the host.

torchao's CPUOffloadOptimizer has for every weight of at least 4096 elements a pinned copy of it and
of its gradient on the host, and an optimizer there. Each gradient is copied over; the step waits for
each copy, updates the host's weight, and copies it back. The device keeps weights and gradients;
the host pays 16 bytes per trained fp32 weight.

`SteppedOnHost` makes up for what it lacks:
- its groups hold the host's weights, one each: the wrapper exposes the device's, and passes
  learning rates on.
- its hooks copy every gradient in the backward of every micro-batch, before clipping changes it. They
  are taken off, and gradients are copied once a step, all at its beginning: meanwhile the host
  updates the first of them, which takes it longer than a copy.
- it copies weights when it is made, so a checkpoint loaded later would be lost: they are copied
  again.
- loading a state makes new groups in the optimizer of small weights, while it goes on exposing the
  former ones.
- it keeps no handles of its hooks, so they are found on the weights.
Gradients stay on the device (`offload_gradients` off), because freeing them there would forbid
accumulation.

Beside `parameter_offload` the weights of blocks and their gradients rest on the host anyway:
`SteppedAtRest` updates them there, and only what is outside the blocks goes through torchao.

AdamW alone is worth it: of Llama 3.1 8B in bf16 it is predicted to hold 32.1 GB, `adafactor` 6.5
MB, `sgd` nothing.
"""

import functools
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.core.errors import RefusedError
from autofit.core.hardware import GIB
from autofit.core.knobs.optimizer_offload import KNOB
from autofit.core.some_blocks import SomeBlocks, offloaded_of
from autofit.setup import Config, Hardware, Setup, Stage, Technique, Value, Workload, requirements
from autofit.setup.host_copies import pinning
from autofit.setup.layers import repeated_blocks
from autofit.setup.master_weights import OF_GROUPS
from autofit.setup.streamed_blocks import is_whole


class OptimizerOffload(Technique):
    """`cpu`: the state of `adamw` in host memory, stepped by torch's fused AdamW for CPUs. `cpu:12`:
    that of the first twelve blocks; the device steps the rest meanwhile.
    """

    record = KNOB
    stage = Stage.STEP  # after `optimizer`, whose groups it uses
    cuda_values = host_values = ("cpu",)
    library = "torchao"
    all_exact = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """One word where all blocks are alike."""
        return self.in_one_word(config, workload)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if config[self.name] == self.off:
            return None
        if hardware.device == "cpu":
            return (
                "on a CPU the state is in the host's memory already, so there is nothing to "
                "offload; use none."
            )
        if lacking := requirements.missing("torchao"):
            return f"it needs {lacking}, or use none."

        if config.optimizer != "adamw":
            # The others have little state to offload.
            return (
                f"the step on the host is that of adamw, not of {config.optimizer}; use optimizer "
                "adamw."
            )
        if config.precision == "fp16-mixed":
            return (
                "gradients go to the host before the loss scaler of fp16-mixed unscales them; use "
                "bf16-mixed."
            )

        if SomeBlocks.of(config[self.name]) and workload.traits and not workload.traits.blocks:
            return "the model has no repeated blocks to count; use cpu."

        needed = _least_bytes(config, workload) / GIB
        there = hardware.host_memory_bytes / GIB
        if hardware.here and needed > there:
            return (
                f"the host would hold {needed:.0f} GiB at least, and has {there:.0f}; use none, or "
                "train adapters."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        from torchao.optim import CPUOffloadOptimizer

        _step_on_host(setup, value, CPUOffloadOptimizer)

    def trace(self, setup: Setup, value: Value) -> None:
        """With a stand-in for torchao's class, which needs the streams and pinned memory of a
        GPU."""
        stand_in = functools.partial(_StandIn, note_host=setup.tracing.note_host)
        _step_on_host(setup, value, stand_in)


def _least_bytes(config: Config, workload: Workload) -> int:
    """What the host holds of all weights where these are trained: copies, gradients and two
    moments."""
    if workload.traits is None or not is_whole(config):
        return 0
    size = 2 if config.precision in ("bf16", "fp8") else 4
    blocks = max(workload.traits.blocks, 1)
    share = offloaded_of(config.optimizer_offload, blocks) / blocks
    return int(4 * workload.traits.parameters * size * share)


def _step_on_host(setup: Setup, value: Value, kind: Callable[..., Any]) -> None:
    some = SomeBlocks.of(value)
    if some:
        blocks = repeated_blocks(setup.model)[: some.number]
        chosen = {weight for block in blocks for weight in block.parameters()}
        kind = functools.partial(_step_some_on_host, kind, chosen)

    groups = setup.optimizer.param_groups
    host_params = setup.host_params()
    others = []
    for group in groups:
        rest = [weight for weight in group["params"] if weight not in host_params]
        if rest:
            others.append({**group, "params": rest})

    front: SteppedOnHost | None = None
    if others:
        front = SteppedOnHost(others, functools.partial(kind, lr=setup.hyperparameters.lr))

    if host_params:
        setup.optimizer = SteppedAtRest(groups, setup.host_params, front, setup.tracing.note_host)
    else:
        assert front is not None, "what is not updated on the host is updated here"
        setup.optimizer = front
    setup.make_optimizer = None  # another one for the same weights would step them twice


def _step_some_on_host(
    kind: Callable[..., Any],
    chosen: Set[nn.Parameter],
    groups: list[dict[str, Any]],
    optimizer: type[Optimizer],
    **settings: Any,
) -> Any:
    """torchao's optimizer of some weights; all others are stepped beside those that are too small
    for it, on the device."""

    def of(are_chosen: bool) -> list[dict[str, Any]]:
        found = []
        for group in groups:
            weights = [each for each in group["params"] if (each in chosen) == are_chosen]
            if weights:
                found.append({**group, "params": weights})
        return found

    on_host = of(True)
    if not on_host:
        raise RefusedError("optimizer_offload: these blocks have no trained weights; use none.")

    made = kind(on_host, optimizer, **settings)
    on_device = of(False)
    if on_device and made.d_opt is None:
        made.d_opt = optimizer(on_device, **settings)
    elif on_device:
        for group in on_device:
            made.d_opt.add_param_group(group)

    return made


class _InGroups(Optimizer):
    """Shows weights as they are on the device, in the groups of the plain optimizer, and passes
    the settings of those on to the optimizers that step them."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        keys = ("params", *OF_GROUPS)
        shown = [{key: group[key] for key in keys if key in group} for group in groups]
        super().__init__(shown, {"lr": groups[0]["lr"]})

        self._group_of: dict[torch.Tensor, int] = {}
        for number, group in enumerate(self.param_groups):
            self._group_of.update(dict.fromkeys(group["params"], number))

    def _pass_on(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            own = self.param_groups[self._group_of[group["params"][0]]]
            group.update(lr=own["lr"], weight_decay=own["weight_decay"])


class SteppedAtRest(_InGroups):
    """AdamW on the host for the weights that rest there.

    Args:
        groups: of the plain optimizer.
        host_params: the weights that rest, each with the tensor that holds it and its gradient.
        others: steps the rest.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        host_params: Callable[[], dict[nn.Parameter, torch.Tensor]],
        others: "SteppedOnHost | None",
        note_host: Callable[[torch.Tensor], Any],
    ) -> None:
        super().__init__(groups)
        self._host_params = host_params
        self._others = others
        self._note_host = note_host
        self._weights = host_params()

        on_host = []
        for number, group in enumerate(self.param_groups):
            held = [self._weights[weight] for weight in group["params"] if weight in self._weights]
            self._group_of.update(dict.fromkeys(held, number))
            if held:
                on_host.append({**group, "params": held})
        self._on_host = torch.optim.AdamW(on_host, lr=groups[0]["lr"], fused=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._pass_on(self._on_host)
        if self._others:
            self._pass_on(self._others)

        self._host_params()  # has the gradients come to the host
        self._on_host.step()
        for state in self._on_host.state.values():
            # made from no other tensor: nothing else shows where it is
            self._note_host(state["step"])
        if self._others:
            self._others.step()
        self._expose_state()

    def _expose_state(self) -> None:
        self.state.clear()
        for weight, host in self._weights.items():
            if host in self._on_host.state:
                self.state[weight] = self._on_host.state[host]
        if self._others:
            self.state.update(self._others.state)

    def parts(self) -> dict[str, Any]:
        """The optimizers of which this one consists, as `state_dict` has their states."""
        return {"at_rest": self._on_host, "others": self._others and self._others.parts()}

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of both optimizers."""
        return {
            "at_rest": self._on_host.state_dict(),
            "others": self._others and self._others.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._on_host.load_state_dict(state_dict["at_rest"])
        if self._others:
            self._others.load_state_dict(state_dict["others"])
        self._expose_state()


class SteppedOnHost(_InGroups):
    """Wraps torchao's CPUOffloadOptimizer: groups, weights and state as the loop expects them.

    Args:
        make: makes torchao's optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]], make: Callable[..., Any]) -> None:
        super().__init__(groups)
        given = [dict(group) for group in self.param_groups]
        with pinning():
            self._inner = make(given, torch.optim.AdamW, fused=True)

        self._on_host: dict[nn.Parameter, torch.Tensor] = self._inner.param_d2h_map
        self._copies: dict[nn.Parameter, Callable[[nn.Parameter], None]] = {}
        for device, host in self._on_host.items():
            self._group_of[host] = self._group_of[device]
            _, self._copies[device] = _hooks_of(device).popitem()

    def step(self, closure: Any = None) -> Any:
        for optimizer in self._inner.optim_dict.values():  # one per weight, on the host
            self._pass_on(optimizer)
        if self._inner.d_opt is not None:  # one for all small weights, on the device
            self._pass_on(self._inner.d_opt)

        for parameter, copy_gradient in self._copies.items():
            copy_gradient(parameter)  # nothing where it has none

        loss = self._inner.step(closure)

        self._expose_state()
        return loss

    def _expose_state(self) -> None:
        self.state.clear()
        for device, host in self._on_host.items():
            inner = self._inner.optim_dict[device]
            if host in inner.state:
                self.state[device] = inner.state[host]
        if self._inner.d_opt is not None:
            self.state.update(self._inner.d_opt.state)

    def parts(self) -> dict[str, Any]:
        """The optimizers of which torchao's consists, as its `state_dict` has their states."""
        parts: dict[str, Any] = {"offloaded": list(self._inner.optim_dict.values())}
        if self._inner.d_opt is not None:
            parts["on-device"] = self._inner.d_opt
        return parts

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, and copy the device's current weights."""
        self._inner.load_state_dict(state_dict)
        self._inner.queue.clear()
        with torch.no_grad():
            for device, host in self._on_host.items():
                host.copy_(device)
        self._expose_state()


_SMALLEST = 4096  # elements: CPUOffloadOptimizer's minimal_size


class _StandIn:
    """CPUOffloadOptimizer on fake tensors: what is on the device, on the host, and copied between
    them."""

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
                    own = {**group, "params": [self._on_host(weight)]}
                    self.optim_dict[weight] = kind([own], **settings)

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
        # at first there is no queue
        for weight, optimizer in self.optim_dict.items():
            if weight.grad is None:
                continue

            host = self.param_d2h_map[weight]
            optimizer.step()
            # made from no other tensor: nothing else shows where it is
            self._note_host(optimizer.state[host]["step"])
            weight.copy_(host)
        self.queue.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of the optimizers, as torchao's has them."""
        state: dict[str, Any] = {}
        state["offloaded"] = [optimizer.state_dict() for optimizer in self.optim_dict.values()]
        if self.d_opt is not None:
            state["on-device"] = self.d_opt.state_dict()
        return state


def _hooks_of(parameter: nn.Parameter) -> dict[int, Callable[[nn.Parameter], None]]:
    """The hooks that run when a gradient is complete, in order of registration."""
    return parameter._post_accumulate_grad_hooks
