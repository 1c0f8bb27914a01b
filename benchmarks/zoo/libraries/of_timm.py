"""timm's classifiers: what it makes tiny for its own tests, and the smallest of some other families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit

BATCH, SIDE = 4, 64
NAMES = (
    *(
        "test_byobnet",
        "test_coatnet",
        "test_convnext",
        "test_efficientnet",
        "test_mambaout",
        "test_maxvit",
        "test_nfnet",
    ),
    *("test_resnet", "test_vit", "test_vit_relpos"),
    *(
        "resnet10t",
        "mobilenetv3_small_050",
        "lcnet_050",
        "ghostnet_050",
        "regnetx_002",
        "mobilevitv2_050",
    ),
    *(
        "efficientvit_b0",
        "edgenext_xx_small",
        "repvgg_a0",
        "dla46_c",
        "fastvit_t8",
        "rexnet_100",
        "starnet_s1",
    ),
    *(
        "xcit_nano_12_p16_224",
        "poolformer_s12",
        "pvt_v2_b0",
        "levit_128s",
        "tinynet_e",
        "mnasnet_small",
    ),
)


def batch(n: int, side: int = SIDE) -> dict[str, Tensor]:
    """Images and classes."""
    return {"x": torch.randn(n, 3, side, side), "y": torch.arange(n) % 10}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the images."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def __getattr__(name: str) -> Callable[[], autofit.Workload]:
    """The function of a model, by timm's name."""
    if name not in NAMES:
        raise AttributeError(name)
    return lambda: _workload(name)


def _workload(name: str) -> autofit.Workload:
    fixed = timm.get_pretrained_cfg_value(name, "fixed_input_size")
    side = timm.get_pretrained_cfg_value(name, "input_size")[-1] if fixed else SIDE

    def model() -> Any:
        return timm.create_model(name, num_classes=10)

    return autofit.Workload(
        model=model, batch=lambda n: batch(n, side), loss=loss, effective_batch_size=BATCH
    )
