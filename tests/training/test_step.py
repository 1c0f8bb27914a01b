"""The loop learns what a hand-written one learns: the same gradients however a batch is cut, the same weights after."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autofit.core.errors import InputError
from autofit.core.workload import Hyperparameters, Workload
from autofit.training.build import build
from autofit.training.loss import loss_and_count
from autofit.training.step import accumulate, train_step, update
from tests import tiny


def by_hand(workload: Workload, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsplit batch in plain PyTorch."""
    model = tiny.living(workload).train()
    output = workload.loss(model, batch) if workload.loss else model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def in_slices(
    workload: Workload, batch: Any, micro: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same by the loop, `micro` samples at a time."""
    setup = build(workload, {}, tiny.CPU, model=tiny.living(workload))
    setup.micro_batch_size = micro
    loss = accumulate(setup, batch)
    return loss, {name: parameter.grad for name, parameter in setup.model.named_parameters()}


def assert_same(one: tuple[torch.Tensor, dict], other: tuple[torch.Tensor, dict]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-3, atol=1e-6)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative distance between two gradients of one weight."""
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


def masked_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that averages over what a mask of its own says."""
    per_sample = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (per_sample * batch["mask"]).sum() / batch["mask"].sum()


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def valid_only(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["labels"])


def masked_batch(samples: int) -> dict[str, torch.Tensor]:
    x, y = tiny.mlp_workload().batch(samples)
    return {"x": x, "y": y, "mask": torch.arange(samples) % 3 != 1}


def labelled_batch(samples: int) -> dict[str, torch.Tensor]:
    x, y = tiny.mlp_workload().batch(samples)
    return {"x": x, "labels": torch.where(torch.arange(samples) % 4 == 0, -100, y)}


WORKLOADS: dict[str, tuple[Workload, Callable[[int], Any]]] = {
    "causal lm": (tiny.llama_workload(), lambda n: tiny.llama_workload().batch(n)),
    "causal lm, uneven padding": (
        tiny.llama_workload(),
        lambda n: tiny.padded_batch(tiny.LENGTHS[:n]),
    ),
    "mean over tokens": (tiny.transformer_workload(), tiny.transformer_workload().batch),
    "mean over samples": (tiny.mlp_workload(), tiny.mlp_workload().batch),
    "mean over valid labels": (replace(tiny.mlp_workload(), loss=valid_only), labelled_batch),
    "sum": (replace(tiny.mlp_workload(), loss=summed, reduction="sum"), tiny.mlp_workload().batch),
    "a count of its own": (
        replace(tiny.mlp_workload(), loss=masked_mean, count=lambda batch: batch["mask"].sum()),
        masked_batch,
    ),
}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(
    ("samples", "micro"), [(8, 8), (8, 4), (8, 2), (8, 1), (7, 3), (7, 7), (2, 4)]
)
def test_any_cut_gives_the_gradient_of_the_whole(name: str, samples: int, micro: int) -> None:
    workload, make = WORKLOADS[name]
    assert_same(in_slices(workload, make(samples), micro), by_hand(workload, make(samples)))


def test_slices_without_a_valid_label_would_be_0_by_0() -> None:
    """What the loop must skip is there in the padded batch, and is no number."""
    for sample in (3, 5):
        alone = {key: tensor[sample : sample + 1] for key, tensor in tiny.padded_batch().items()}
        assert tiny.living(tiny.llama_workload())(**alone).loss.isnan()


def test_counting_labels_that_are_never_predicted_would_learn_something_else() -> None:
    """Why causal labels are counted shifted: the first of each sample is in no loss."""
    unshifted = replace(tiny.llama_workload(), count=lambda batch: (batch["labels"] != -100).sum())
    batch = tiny.padded_batch((16, 3, 9, 2, 16, 2, 5, 12))
    _, wanted = by_hand(unshifted, batch)
    assert furthest(in_slices(tiny.llama_workload(), batch, 1)[1], wanted) < 1e-3
    assert furthest(in_slices(unshifted, batch, 1)[1], wanted) > 0.05


def test_counting_samples_would_learn_something_else_too() -> None:
    by_samples = replace(tiny.llama_workload(), count=len_of_first)
    batch = tiny.padded_batch((16, 3, 9, 2, 16, 2, 5, 12))
    _, wanted = by_hand(by_samples, batch)
    assert furthest(in_slices(by_samples, batch, 1)[1], wanted) > 0.05


def len_of_first(batch: dict[str, torch.Tensor]) -> int:
    return len(batch["labels"])


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_batch_without_any_valid_label_changes_nothing(precision: str) -> None:
    setup = build(tiny.llama_workload(), {"precision": precision}, tiny.CPU)
    before = {name: parameter.detach().clone() for name, parameter in setup.trainable()}
    assert train_step(setup, tiny.padded_batch((0, 1, 0, 1))) == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in setup.trainable())
    assert train_step(setup, tiny.padded_batch((4, 4, 4, 4))) > 0


# The update.


def test_gradients_are_clipped_by_their_global_norm() -> None:
    workload = tiny.mlp_workload(4)
    chosen = Hyperparameters(lr=1.0, max_grad_norm=0.01)
    setup = build(workload, {"optimizer": "sgd"}, tiny.CPU, hyperparameters=chosen)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    train_step(setup, workload.batch(4))
    moved = [
        parameter.detach() - old
        for parameter, old in zip(setup.model.parameters(), before, strict=True)
    ]
    norm = torch.stack([each.norm() for each in moved]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


def test_gradients_of_the_true_size_are_clipped_under_a_loss_scaler() -> None:
    workload = tiny.mlp_workload(4)
    chosen = Hyperparameters(lr=1.0, max_grad_norm=0.01)
    config = {"optimizer": "sgd", "precision": "fp16-mixed"}
    setup = build(workload, config, tiny.CPU, hyperparameters=chosen)
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    accumulate(setup, workload.batch(4))
    assert update(setup)
    moved = [
        parameter.detach() - old
        for parameter, old in zip(setup.model.parameters(), before, strict=True)
    ]
    assert float(torch.stack([each.norm() for each in moved]).norm()) == pytest.approx(
        0.01, rel=1e-2
    )


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_whose_gradients_overflow_is_skipped_and_said_so(
    max_grad_norm: float | None,
) -> None:
    workload = tiny.llama_workload()
    chosen = Hyperparameters(max_grad_norm=max_grad_norm)
    setup = build(workload, {"precision": "fp16-mixed"}, tiny.CPU, hyperparameters=chosen)
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    loss = accumulate(setup, workload.batch(4))
    assert loss.isfinite()  # reported without the scale
    assert update(setup) is False
    assert all(
        torch.equal(new, old) for new, old in zip(setup.model.parameters(), before, strict=True)
    )
    assert setup.scaler.get_scale() == 2.0**59
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulate(setup, workload.batch(4))
    assert update(setup) is True
    assert not all(
        torch.equal(new, old) for new, old in zip(setup.model.parameters(), before, strict=True)
    )


def test_a_scale_that_grows_is_no_skipped_step() -> None:
    setup = build(tiny.mlp_workload(4), {"precision": "fp16-mixed"}, tiny.CPU)
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    accumulate(setup, setup.workload.batch(4))
    assert update(setup) is True
    assert setup.scaler.get_scale() == 128.0


def test_gradients_are_gone_after_a_step() -> None:
    setup = build(tiny.mlp_workload(4), {}, tiny.CPU)
    train_step(setup, setup.workload.batch(4))
    assert all(parameter.grad is None for parameter in setup.model.parameters())


# The loss.


def loss_of(loss: Callable[[nn.Module, Any], Any]) -> torch.Tensor:
    setup = build(replace(tiny.mlp_workload(), loss=loss), {}, tiny.CPU)
    return loss_and_count(setup, setup.workload.batch(2))[0]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda model, batch: model(batch[0]),
            "the loss must be one number in a tensor, not a tensor of shape (2, 10). Take its mean.",
        ),
        (lambda model, batch: 1.5, "the loss must be one number in a tensor, not float."),
        (
            lambda model, batch: (model(batch[0]).mean(), model(batch[0]).sum()),
            "the loss is a tuple of 2: autofit trains one loss with one optimizer. Add up the losses",
        ),
        (
            lambda model, batch: {
                "generator": model(batch[0]).mean(),
                "critic": model(batch[0]).sum(),
            },
            "the loss is a dict of 2: autofit trains one loss with one optimizer. Add up the losses",
        ),
        (
            lambda model, batch: (model(batch[0]).mean(), torch.ones(2)),
            "the loss must be one number in a tensor, not tup",
        ),
        (lambda model, batch: None, "the loss must be one number in a tensor, not NoneType."),
        (
            lambda model, batch: model(batch[0]).mean().detach(),
            "the loss needs no gradient: no trainable weight takes part in it. Check requires_grad.",
        ),
    ],
)
def test_a_loss_that_cannot_be_trained_on(loss: Callable, message: str) -> None:
    with pytest.raises(InputError) as caught:
        loss_of(loss)
    assert str(caught.value).startswith(message)


def test_one_number_in_any_shape_will_do() -> None:
    assert loss_of(lambda model, batch: model(batch[0]).mean().reshape(1, 1)).shape == ()


class Returns(nn.Module):
    """A model whose forward returns what a function makes of its loss."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.make = make

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        return self.make((x * self.weight).mean() * (1 if scale is None else scale.mean()))


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "make", [lambda x: x, Output, lambda x: {"loss": x, "logits": None}], ids=["it", "attr", "key"]
)
@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2, 3),
        (torch.ones(2, 3), torch.ones(2)),
        [torch.ones(2, 3)],
        {"x": torch.ones(2, 3)},
    ],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_without_a_loss_the_models_own_is_taken(make: Callable, batch: Any) -> None:
    workload = Workload(model=lambda: Returns(make), batch=lambda n: batch, effective_batch_size=2)
    setup = build(workload, {}, tiny.CPU, model=Returns(make))
    assert float(accumulate(setup, batch)) == 1.0


def test_a_batch_of_several_micro_batches_is_not_stepped_in_the_backward() -> None:
    setup = build(tiny.mlp_workload(4), {"optimizer_in_backward": True}, tiny.CPU)
    with pytest.raises(
        InputError,
        match="a batch of 8 samples is more than one micro-batch of 4, and each backward",
    ):
        train_step(setup, setup.workload.batch(8))
    assert train_step(setup, setup.workload.batch(4)).isfinite()
