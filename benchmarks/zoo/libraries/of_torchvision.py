"""torchvision's models: classifiers, video and segmentation, the smallest of each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

import autofit

BATCH, SIDE = 4, 64
VIDEO = ("r3d_18",)
SEGMENTATION = ("lraspp_mobilenet_v3_large",)
NAMES = (
    *(
        "resnet18",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "squeezenet1_1",
        "shufflenet_v2_x0_5",
        "mnasnet0_5",
    ),
    *("efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet", "vit_tiny", "swin_tiny"),
    *VIDEO,
    *SEGMENTATION,
)


def classes(n: int) -> dict[str, Any]:
    """Images and classes."""
    return {"x": torch.randn(n, 3, SIDE, SIDE), "y": torch.arange(n) % 10}


def class_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The mean over the images; some models answer with further heads."""
    answer = model(batch["x"])
    return functional.cross_entropy(answer if isinstance(answer, Tensor) else answer[0], batch["y"])


def __getattr__(name: str) -> Callable[[], autofit.Workload]:
    """The function of a model, by torchvision's name."""
    if name not in NAMES:
        raise AttributeError(name)
    return lambda: _workload(name)


def _workload(name: str) -> autofit.Workload:
    batch: Any = classes
    loss: Any = class_loss
    if name in VIDEO:
        batch = lambda n: {"x": torch.randn(n, 3, 16, SIDE, SIDE), "y": torch.arange(n) % 10}  # noqa: E731
    elif name in SEGMENTATION:
        batch = lambda n: {  # noqa: E731
            "x": torch.randn(n, 3, SIDE, SIDE),
            "y": torch.randint(10, (n, SIDE, SIDE)),
        }
        loss = lambda model, batch: functional.cross_entropy(model(batch["x"])["out"], batch["y"])  # noqa: E731
    return autofit.Workload(
        model=lambda: _model(name), batch=batch, loss=loss, effective_batch_size=BATCH
    )


def _model(name: str) -> Any:
    if name == "vit_tiny":
        return torchvision.models.VisionTransformer(SIDE, 16, 2, 4, 64, 128, num_classes=10)
    if name == "swin_tiny":
        return torchvision.models.SwinTransformer(
            [4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10
        )
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    backbone = {"weights_backbone": None} if name in SEGMENTATION else {}
    return torchvision.models.get_model(name, weights=None, num_classes=10, **options, **backbone)
