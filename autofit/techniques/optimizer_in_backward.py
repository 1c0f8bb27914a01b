"""optimizer_in_backward: apply each gradient the moment the backward has it, and free it.

All gradients together are as large as the weights that are trained; this way one or two are alive at a time. Nothing
may then need all of them at once: no accumulation, no loss scaler, no clipping by the norm of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique


class OptimizerInBackward(Technique):
    """`true`: one optimizer for every weight, stepped by a hook when that weight's gradient is complete."""

    name = "optimizer_in_backward"
    stage = Stage.STEP  # after `optimizer`, whose kind and groups it takes over
    off = False
    values = (False, True)

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        """No memory order: temporaries of a step (foreach, adafactor) stand beside activations here."""
        if not config[self.name]:
            return None
        if config["gradient_accumulation_steps"] != 1:
            whole = workload.effective_batch_size // hardware.ranks
            return f"gradients that are applied at once cannot accumulate; set micro_batch_size to the whole {whole}."
        if config["precision"] == "fp16-mixed":
            return "the loss scaler of fp16-mixed must see all gradients before any is applied; use bf16-mixed."
        if config.get("optimizer_offload", "none") != "none":
            return "optimizer_offload steps on the host, after the backward; set one of the two to its off value."
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if setup.hyperparameters.max_grad_norm is not None:
            raise RefusedError(
                "clipping by max_grad_norm needs all gradients at once, and optimizer_in_backward frees each; "
                "leave out max_grad_norm, or set optimizer_in_backward to false."
            )
        assert setup.optimizer is not None, "the technique `optimizer` comes before"
        assert setup.make_optimizer is not None, "the technique `optimizer` comes before"
        names = {parameter: name for name, parameter in setup.trainable()}
        front = SteppedInBackward(setup.optimizer.param_groups, setup.make_optimizer, names)
        setup.on_close(front.remove_hooks)
        setup.optimizer = front
        setup.stepped_in_backward = front.stepped


class SteppedInBackward(Optimizer):
    """The front of one optimizer for each weight: their groups, their state, and the hooks that step them.

    Args:
        groups: as of the plain optimizer; their weight decay goes on to each weight.
        names: what a weight is called in a message.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        names: dict[nn.Parameter, str],
    ) -> None:
        self._each: dict[nn.Parameter, Optimizer] = {
            parameter: make([{"params": [parameter], "weight_decay": group["weight_decay"]}])
            for group in groups
            for parameter in group["params"]
        }
        super().__init__(list(self._each), {})
        self._names = names
        self._applied: set[nn.Parameter] = set()
        self._show()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._apply, inner))
            for parameter, inner in self._each.items()
        ]

    def _show(self) -> None:
        """Show the very groups of the inner optimizers, so that a learning rate set here is theirs, and their state."""
        self.param_groups = [group for inner in self._each.values() for group in inner.param_groups]
        self.state.clear()
        for parameter, inner in self._each.items():
            if parameter in inner.state:
                self.state[parameter] = inner.state[parameter]

    def _apply(self, inner: Optimizer, parameter: nn.Parameter) -> None:
        """Step one weight. A second gradient in a step would be a second update: that is no longer the same training.

        Autograd calls this once a backward, when all uses of a tied weight have added their part.
        """
        if parameter in self._applied:
            raise InputError(
                f"optimizer_in_backward has applied a gradient of {self._names[parameter]} in this step already: "
                "there was more than one backward.",
                "Set optimizer_in_backward to false.",
            )
        inner.step()
        parameter.grad = None
        self.state[parameter] = inner.state[parameter]
        self._applied.add(parameter)

    def stepped(self) -> bool:
        """Whether any gradient has been applied since this was last asked, which ends the step."""
        applied, self._applied = bool(self._applied), set()
        return applied

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply gradients that came by another way than the backward; none is left after that."""
        for inner in self._each.values():
            inner.step()
        self._show()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._applied.clear()

    def state_dict(self) -> dict[str, Any]:
        """One of each inner optimizer, as its library lays it out."""
        return {"each": [inner.state_dict() for inner in self._each.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for inner, state in zip(self._each.values(), state_dict["each"], strict=True):
            inner.load_state_dict(state)
        self._applied.clear()
        self._show()

    def remove_hooks(self) -> None:
        """Give the weights back; from here on a backward leaves gradients."""
        for hook in self._hooks:
            hook.remove()
