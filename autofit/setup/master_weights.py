"""AdamW beside bf16 weights: on copies of them in fp32, the master weights, which it rounds to the
weights after each step (Micikevicius et al. 2018, arXiv 1710.03740)."""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.adamw import adamw

OF_GROUPS = ("lr", "lr_ratio", "weight_decay")  # what a group of parameters may have of its own


class KeepsFormats(Optimizer):
    """Loads state in the formats that it was saved in. PyTorch would cast it to those of the
    weights."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        weights: list[Any] = []
        for group in self.param_groups:
            weights += group["params"]

        for number, saved in state_dict["state"].items():
            weight = weights[number]
            state = self.state[weight]
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and value.dtype != state[key].dtype:
                    state[key] = value.to(weight.device, copy=True)


class MasterWeights(KeepsFormats):
    """AdamW whose moments and weights are in fp32: 12 bytes for each weight, beside the weights
    themselves."""

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, weight_decay: float = 0.0
    ) -> None:
        # `fused` also says where a checkpoint's counters belong: beside the weights
        # (torch.optim.Optimizer).
        options = {
            "lr": lr,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": weight_decay,
            "fused": True,
        }
        super().__init__(groups, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """One weight after the other: gradients in fp32 exist for one at a time."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["master"] = weight.to(torch.float32, copy=True)
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])

        assert weight.grad is not None, "step() asks"

        beta1, beta2 = group["betas"]
        adamw(
            [state["master"]],
            [weight.grad.float()],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

        weight.copy_(state["master"])
