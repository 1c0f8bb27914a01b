"""Muon for the matrices of a model's blocks, AdamW for all else: embeddings, heads, vectors (Jordan
et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982)."""

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.setup.layers import repeated_blocks


def matrices_of_blocks(model: nn.Module) -> set[nn.Parameter]:
    """The trained matrices inside repeated blocks; of weights without a model, those marked
    `of_block`."""
    weights = {weight for weight in model.parameters() if getattr(weight, "of_block", False)}
    for block in repeated_blocks(model):
        weights.update(block.parameters())
    return {weight for weight in weights if weight.dim() == 2 and weight.requires_grad}


class MuonBesideAdamW(Optimizer):
    """torch's Muon with steps as large as AdamW's (`match_rms_adamw`), so that one learning rate
    serves both.

    State: 4 bytes for each fp32 weight that Muon steps, 8 for the others; what it multiplies is
    bf16.

    Args:
        matrices: the weights that Muon steps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        matrices: Set[nn.Parameter],
    ) -> None:
        parts = []
        for group in groups:
            for muon in (True, False):
                chosen = [weight for weight in group["params"] if (weight in matrices) == muon]
                if chosen:
                    parts.append({**group, "params": chosen, "muon": muon})
        super().__init__(parts, {"lr": lr, "weight_decay": weight_decay})

        # They add their own settings to these groups.
        self._inner: dict[bool, Optimizer] = {}
        of_muon = self._groups(muon=True)
        if of_muon:
            self._inner[True] = torch.optim.Muon(of_muon, adjust_lr_fn="match_rms_adamw")
        others = self._groups(muon=False)
        if others:
            self._inner[False] = torch.optim.AdamW(others, fused=True)

    def _groups(self, *, muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"] == muon]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both; loading a state replaces groups and state, which are theirs."""
        for muon, inner in self._inner.items():
            inner.param_groups = self._groups(muon=muon)
            inner.state = self.state
            inner.step()
