"""A second gradient is added in place, as the engine does it on plain tensors, unless somebody else holds the first."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.estimate.recorder import Recorder
from tests.estimate.traced import AMPERE

SIDE = 256
NBYTES = 4 * SIDE * SIDE


def highest(loss: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """The largest number of squares alive in the backward, of those made there."""
    with FakeTensorMode():
        weight = torch.empty(SIDE, SIDE, requires_grad=True)
        with Recorder(AMPERE) as recorder:
            value = loss(weight)
            recorder.mark("backward")
            value.backward()
    live: dict[int, int] = {}
    made, top = recorder.marks[-1].events, 0
    for event in recorder.events[made:]:
        live[event.storage] = event.nbytes
        top = max(top, sum(live.values()))
    return top // NBYTES


def test_two_products_need_two_gradients() -> None:
    assert highest(lambda weight: (weight * 2.0).sum() + (weight * 3.0).sum()) == 2


class CheckpointPolicy(torch.autograd.Function):
    """Holds on to the gradient that it hands back."""

    held: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        CheckpointPolicy.held.append(torch.zeros(SIDE, SIDE))
        return CheckpointPolicy.held[-1]


def test_a_gradient_that_is_held_elsewhere_is_not_written_to() -> None:
    assert highest(lambda weight: (weight * 2.0).sum() + CheckpointPolicy.apply(weight)) == 3  # type: ignore[no-untyped-call]
    CheckpointPolicy.held.clear()


def test_plain_tensors_are_left_to_the_engine() -> None:
    weight = torch.ones(4, requires_grad=True)
    with Recorder(AMPERE):
        ((weight * 2.0).sum() + (weight * 3.0).sum()).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0] * 4
