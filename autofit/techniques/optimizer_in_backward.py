"""optimizer_in_backward: apply and free each gradient as soon as the backward has computed it.

All gradients together are as large as the trained weights; this way one or two are alive at a time.
Nothing may need all of them at once: no accumulation, no loss scaler, no clipping by the global
norm.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autofit.core.knobs.optimizer_in_backward import KNOB
from autofit.core.layout import dp_degree
from autofit.setup import (
    Config,
    Hardware,
    InputError,
    RefusedError,
    Setup,
    Stage,
    Technique,
    Value,
    Workload,
)
from autofit.setup.master_weights import OF_GROUPS


class OptimizerInBackward(Technique):
    """`true`: one optimizer per weight, stepped by a hook when that weight's gradient is complete.

    No memory order: temporaries of a step (foreach, adafactor) coexist with activations here.
    """

    record = KNOB
    stage = Stage.STEP  # after `optimizer`, whose kind and groups it uses
    all_exact = True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        if not config[self.name]:
            return None

        if config.gradient_accumulation_steps != 1:
            whole = workload.effective_batch_size // dp_degree(config, hardware)
            return (
                "gradients that are applied at once cannot accumulate; set micro_batch_size to the "
                f"whole {whole}."
            )
        if config.precision == "fp16-mixed":
            return (
                "the loss scaler of fp16-mixed must see all gradients before any is applied; use "
                "bf16-mixed."
            )
        if config.optimizer_offload != "none":
            return (
                "optimizer_offload steps on the host, after the backward; set one of the two to "
                "its off value."
            )
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        if setup.hyperparameters.max_grad_norm is not None:
            raise RefusedError(
                "clipping by max_grad_norm needs all gradients at once, and optimizer_in_backward "
                "frees each; leave out max_grad_norm, or set optimizer_in_backward to false."
            )

        assert setup.optimizer and setup.make_optimizer, "the technique `optimizer` comes before"

        names = {parameter: name for name, parameter in setup.trainable()}
        front = SteppedInBackward(setup.optimizer.param_groups, setup.make_optimizer, names)
        setup.on_close(front.remove_hooks)
        setup.optimizer = front
        setup.stepped_in_backward = front.stepped


class SteppedInBackward(Optimizer):
    """One optimizer per weight behind the interface of one: their groups and state, and the hooks
    that step them.

    Args:
        groups: of the plain optimizer; each weight gets the settings of its group.
        make: makes an optimizer for groups.
        names: for messages.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        names: dict[nn.Parameter, str],
    ) -> None:
        self._inner: dict[nn.Parameter, Optimizer] = {}
        for group in groups:
            settings = {key: group[key] for key in OF_GROUPS if key in group}
            for parameter in group["params"]:
                self._inner[parameter] = make([{"params": [parameter], **settings}])
        super().__init__(list(self._inner), {})

        self._names = names
        self._applied: set[nn.Parameter] = set()
        self._expose()
        self._hooks = []
        for parameter, inner in self._inner.items():
            apply = functools.partial(self._apply, inner)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(apply))

    def _expose(self) -> None:
        """Expose the inner optimizers' own groups, so that a learning rate set here is theirs, and
        their state."""
        self.param_groups = []
        self.state.clear()
        for parameter, inner in self._inner.items():
            self.param_groups += inner.param_groups
            if parameter in inner.state:
                self.state[parameter] = inner.state[parameter]

    def _apply(self, inner: Optimizer, parameter: nn.Parameter) -> None:
        """Step one weight; a second gradient in a step would be a second update, which is different
        training. Autograd calls this once per backward, when all uses of a tied weight have added
        their part."""
        if parameter in self._applied:
            raise InputError(
                f"optimizer_in_backward already applied a gradient of {self._names[parameter]} in "
                "this step: there was more than one backward.",
                "Set optimizer_in_backward to false.",
            )

        inner.step()
        parameter.grad = None
        self.state[parameter] = inner.state[parameter]
        self._applied.add(parameter)

    def stepped(self) -> bool:
        """Whether any gradient was applied since the last call, which ends the step."""
        applied = bool(self._applied)
        self._applied.clear()
        return applied

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply gradients that did not come from a backward."""
        for inner in self._inner.values():
            inner.step()
        self._expose()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._applied.clear()

    def parts(self) -> dict[str, Any]:
        """The inner optimizers, as `state_dict` has their states."""
        return {"each": list(self._inner.values())}

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of the inner optimizers."""
        return {"each": [inner.state_dict() for inner in self._inner.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for inner, state in zip(self._inner.values(), state_dict["each"], strict=True):
            inner.load_state_dict(state)
        self._applied.clear()
        self._expose()

    def remove_hooks(self) -> None:
        """From here on a backward leaves gradients on the weights."""
        for hook in self._hooks:
            hook.remove()
