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
VIDEO = ("r3d_18", "s3d")
SEGMENTATION = ("lraspp_mobilenet_v3_large",)
DETECTION = ("ssdlite320_mobilenet_v3_large",)
NAMES = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5"),
    *("efficientnet_b0", "regnet_y_400mf", "densenet121", "googlenet", "vit_tiny", "swin_tiny"),
    *VIDEO,
    *SEGMENTATION,
    *DETECTION,
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
        batch = lambda n: {"x": torch.randn(n, 3, SIDE, SIDE), "y": torch.randint(10, (n, SIDE, SIDE))}  # noqa: E731
        loss = lambda model, batch: functional.cross_entropy(model(batch["x"])["out"], batch["y"])  # noqa: E731
    elif name in DETECTION:
        batch, loss = boxes, detection_loss
    return autofit.Workload(model=lambda: _model(name), batch=batch, loss=loss, effective_batch_size=BATCH)


def _model(name: str) -> Any:
    if name == "vit_tiny":
        return torchvision.models.VisionTransformer(SIDE, 16, 2, 4, 64, 128, num_classes=10)
    if name == "swin_tiny":
        return torchvision.models.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10)
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    backbone = {"weights_backbone": None} if name in SEGMENTATION + DETECTION else {}
    return torchvision.models.get_model(name, weights=None, num_classes=10, **options, **backbone)


def boxes(n: int) -> dict[str, Any]:
    """A list of images, and of boxes and labels for each."""
    corners = torch.tensor([[5.0, 5.0, 40.0, 40.0], [10.0, 10.0, 60.0, 50.0]])
    target = [{"boxes": corners.clone(), "labels": torch.tensor([1, 2])} for _ in range(n)]
    return {"images": [torch.rand(3, SIDE, SIDE) for _ in range(n)], "targets": target}


def detection_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The sum of what the model is told."""
    losses = model(batch["images"], batch["targets"])
    return torch.stack(list(losses.values())).sum()
