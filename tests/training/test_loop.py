"""The loop learns what a hand-written one learns: the same gradients however a batch is cut, the same weights after."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from autofit.core.errors import InputError
from autofit.core.hyperparameters import Hyperparameters
from autofit.core.workload import Workload
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.loop import (
    StepReport,
    accumulate,
    compute_loss,
    evaluate,
    learning_rate_factor,
    train,
    train_step,
    update,
)

LENGTHS = (16, 3, 9, 0, 16, 1, 5, 12)  # valid labels from the front of each sample; of 0 and 1, none is predicted


def padded_batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Samples of these lengths, padded to 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (len(lengths), 16), generator=generator)
    padding = torch.arange(16) >= torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": ids.masked_fill(padding, 0), "labels": ids.masked_fill(padding, -100)}


def living(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model()


def by_hand(workload: Workload, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsplit batch in plain PyTorch."""
    model = living(workload).train()
    output = workload.loss(model, batch) if workload.loss else model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def in_slices(workload: Workload, batch: Any, micro: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same by the loop, `micro` samples at a time."""
    setup = build(workload, {}, tiny.CPU, model=living(workload))
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
    "causal lm, uneven padding": (tiny.llama_workload(), lambda n: padded_batch(LENGTHS[:n])),
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
@pytest.mark.parametrize(("samples", "micro"), [(8, 8), (8, 4), (8, 2), (8, 1), (7, 3), (7, 7), (2, 4)])
def test_any_cut_gives_the_gradient_of_the_whole(name: str, samples: int, micro: int) -> None:
    workload, make = WORKLOADS[name]
    assert_same(in_slices(workload, make(samples), micro), by_hand(workload, make(samples)))


def test_slices_without_a_valid_label_would_be_0_by_0() -> None:
    """What the loop must skip is there in the padded batch, and is no number."""
    for sample in (3, 5):
        alone = {key: tensor[sample : sample + 1] for key, tensor in padded_batch().items()}
        assert living(tiny.llama_workload())(**alone).loss.isnan()


def test_counting_labels_that_are_never_predicted_would_learn_something_else() -> None:
    """Why causal labels are counted shifted: the first of each sample is in no loss."""
    unshifted = replace(tiny.llama_workload(), count=lambda batch: (batch["labels"] != -100).sum())
    batch = padded_batch((16, 3, 9, 2, 16, 2, 5, 12))
    _, wanted = by_hand(unshifted, batch)
    assert furthest(in_slices(tiny.llama_workload(), batch, 1)[1], wanted) < 1e-3
    assert furthest(in_slices(unshifted, batch, 1)[1], wanted) > 0.05


def test_counting_samples_would_learn_something_else_too() -> None:
    by_samples = replace(tiny.llama_workload(), count=len_of_first)
    batch = padded_batch((16, 3, 9, 2, 16, 2, 5, 12))
    _, wanted = by_hand(by_samples, batch)
    assert furthest(in_slices(by_samples, batch, 1)[1], wanted) > 0.05


def len_of_first(batch: dict[str, torch.Tensor]) -> int:
    return len(batch["labels"])


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_a_batch_without_any_valid_label_changes_nothing(precision: str) -> None:
    setup = build(tiny.llama_workload(), {"precision": precision}, tiny.CPU)
    before = {name: parameter.detach().clone() for name, parameter in setup.trainable()}
    assert train_step(setup, padded_batch((0, 1, 0, 1))) == 0
    assert all(torch.equal(parameter, before[name]) for name, parameter in setup.trainable())
    assert train_step(setup, padded_batch((4, 4, 4, 4))) > 0


# The whole loop.


@pytest.mark.parametrize("micro", [8, 3])
def test_training_is_what_a_hand_written_loop_does(micro: int) -> None:
    """AdamW with decay on matrices only, clipping and a warmed-up cosine, over five steps."""
    workload = tiny.mlp_workload(8)
    chosen = Hyperparameters(lr=0.01, weight_decay=0.1, schedule="cosine", warmup_steps=2, max_grad_norm=0.5)
    batches = [tuple(tensor[:8] for tensor in workload.batch(8 + step)) for step in range(5)]

    model = living(workload)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * ((step + 1) / 3 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 3)))
        loss = tiny.classify(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    setup = build(workload, {}, tiny.CPU, model=living(workload), hyperparameters=chosen)
    setup.micro_batch_size = micro
    reports = train(setup, batches, steps=5)
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(setup.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_every_step_is_reported_to_every_callback() -> None:
    workload = tiny.mlp_workload(4)
    setup = build(workload, {}, tiny.CPU, hyperparameters=Hyperparameters(lr=0.01, schedule="linear"))
    heard: list[StepReport] = []
    reports = train(setup, [workload.batch(4), workload.batch(3)] * 2, steps=4, callbacks=[heard.append])
    assert heard == reports
    assert [report.step for report in reports] == [0, 1, 2, 3]
    assert [report.samples for report in reports] == [4, 3, 4, 3]
    assert [report.lr for report in reports] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_going_on_in_the_middle_is_as_if_never_stopped() -> None:
    workload = tiny.mlp_workload(4)
    batches = [workload.batch(4), workload.batch(4), workload.batch(4)]

    def started() -> Setup:
        chosen = Hyperparameters(lr=0.01, schedule="linear")
        return build(workload, {}, tiny.CPU, model=living(workload), hyperparameters=chosen)

    whole, halves = started(), started()
    reports = train(whole, batches, steps=3)
    resumed = train(halves, batches[:1], steps=3, first_step=2)
    assert resumed[0].step == 2
    assert resumed[0].lr == reports[2].lr


def test_no_more_batches_are_taken_than_steps_need() -> None:
    workload = tiny.mlp_workload(4)
    taken: list[int] = []

    def batches() -> Any:
        for number in range(5):
            taken.append(number)
            yield workload.batch(4)

    train(build(workload, {}, tiny.CPU), batches(), steps=2)
    assert taken == [0, 1]


def test_training_goes_on_in_training_mode() -> None:
    setup = build(tiny.conv_workload(4), {}, tiny.CPU)
    setup.model.eval()
    train(setup, [setup.workload.batch(4)], steps=1)
    assert setup.model.training


def test_data_that_ends_early_is_said_with_the_step() -> None:
    workload = tiny.mlp_workload(4)
    with pytest.raises(InputError, match=r"the data ended after 1 of 3 steps\. Give fewer steps, or more data\."):
        train(build(workload, {}, tiny.CPU), [workload.batch(4)], steps=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_said_with_the_step_before_it_does_harm(value: float) -> None:
    workload = tiny.mlp_workload(4)
    good, bad = workload.batch(4), workload.batch(4)
    bad[0].fill_(value)
    setup = build(workload, {}, tiny.CPU)
    with pytest.raises(InputError, match=r"the loss is nan at step 1\. Lower the learning rate"):
        train(setup, [good, bad], steps=2)
    assert all(parameter.isfinite().all() for parameter in setup.model.parameters())


# The update.


def test_gradients_are_clipped_by_their_global_norm() -> None:
    workload = tiny.mlp_workload(4)
    chosen = Hyperparameters(lr=1.0, max_grad_norm=0.01)
    setup = build(workload, {"optimizer": "sgd"}, tiny.CPU, hyperparameters=chosen)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    train_step(setup, workload.batch(4))
    moved = [parameter.detach() - old for parameter, old in zip(setup.model.parameters(), before, strict=True)]
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
    moved = [parameter.detach() - old for parameter, old in zip(setup.model.parameters(), before, strict=True)]
    assert float(torch.stack([each.norm() for each in moved]).norm()) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_whose_gradients_overflow_is_skipped_and_said_so(max_grad_norm: float | None) -> None:
    workload = tiny.llama_workload()
    chosen = Hyperparameters(max_grad_norm=max_grad_norm)
    setup = build(workload, {"precision": "fp16-mixed"}, tiny.CPU, hyperparameters=chosen)
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = [parameter.detach().clone() for parameter in setup.model.parameters()]
    loss = accumulate(setup, workload.batch(4))
    assert loss.isfinite()  # reported without the scale
    assert update(setup) is False
    assert all(torch.equal(new, old) for new, old in zip(setup.model.parameters(), before, strict=True))
    assert setup.scaler.get_scale() == 2.0**59
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accumulate(setup, workload.batch(4))
    assert update(setup) is True
    assert not all(torch.equal(new, old) for new, old in zip(setup.model.parameters(), before, strict=True))


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


# The learning rate.


def test_warm_up_rises_in_a_line_to_the_whole() -> None:
    factor = learning_rate_factor(Hyperparameters(warmup_steps=4), 10)
    assert [factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25, 0]), ("cosine", [1, 0.853553, 0.5, 0.146447, 0])],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    factor = learning_rate_factor(Hyperparameters(schedule=schedule), 4)
    assert [factor(step) for step in range(5)] == pytest.approx(expected, abs=1e-6)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    total=st.integers(1, 60),
)
def test_the_factor_is_never_outside_its_range_and_falls_after_the_warm_up(
    schedule: str, warmup: int, total: int
) -> None:
    factor = learning_rate_factor(Hyperparameters(schedule=schedule, warmup_steps=warmup), total)
    course = [factor(step) for step in range(total)]
    assert all(0 < value <= 1 for value in course)  # every step that is taken learns something
    assert course[:warmup] == sorted(course[:warmup])
    assert course[warmup:] == sorted(course[warmup:], reverse=True)


# The loss.


def loss_of(loss: Callable[[nn.Module, Any], Any]) -> torch.Tensor:
    setup = build(replace(tiny.mlp_workload(), loss=loss), {}, tiny.CPU)
    return compute_loss(setup, setup.workload.batch(2))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda model, batch: model(batch[0]),
            "the loss must be one number in a tensor, not a tensor of shape (2, 10). Take its mean.",
        ),
        (lambda model, batch: 1.5, "the loss must be one number in a tensor, not float."),
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
    [torch.ones(2, 3), (torch.ones(2, 3), torch.ones(2)), [torch.ones(2, 3)], {"x": torch.ones(2, 3)}],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_without_a_loss_the_models_own_is_taken(make: Callable, batch: Any) -> None:
    workload = Workload(model=lambda: Returns(make), batch=lambda n: batch, effective_batch_size=2)
    setup = build(workload, {}, tiny.CPU, model=Returns(make))
    assert float(accumulate(setup, batch)) == 1.0


# Evaluation.


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_mean_loss_of_a_data_set_does_not_depend_on_the_cut(micro: int) -> None:
    workload = tiny.llama_workload()
    setup = build(workload, {}, tiny.CPU, model=living(workload))
    setup.micro_batch_size = micro
    batches = [padded_batch(LENGTHS), padded_batch((4, 9))]
    model = living(workload).eval()
    counts = [sum(max(0, length - 1) for length in LENGTHS), 3 + 8]
    expected = sum(float(model(**batch).loss.detach()) * count for batch, count in zip(batches, counts, strict=True))
    assert evaluate(setup, batches) == pytest.approx(expected / sum(counts), rel=1e-5)


def test_evaluating_leaves_the_model_as_it_was() -> None:
    workload = tiny.conv_workload(4)
    setup = build(workload, {}, tiny.CPU)
    before = {key: value.clone() for key, value in setup.model.state_dict().items()}
    evaluate(setup, [workload.batch(4)])
    assert setup.model.training
    assert all(torch.equal(value, before[key]) for key, value in setup.model.state_dict().items())
    assert all(parameter.grad is None for parameter in setup.model.parameters())


@pytest.mark.parametrize("batches", [[], [padded_batch((0, 1))]])
def test_nothing_to_evaluate_on(batches: list) -> None:
    setup = build(tiny.llama_workload(), {}, tiny.CPU)
    with pytest.raises(InputError, match="there is nothing to evaluate on"):
        evaluate(setup, batches)


def test_a_batch_of_several_micro_batches_is_not_stepped_in_the_backward() -> None:
    setup = build(tiny.mlp_workload(4), {"optimizer_in_backward": True}, tiny.CPU)
    with pytest.raises(InputError, match="a batch of 8 samples is more than one micro-batch of 4, and each backward"):
        train_step(setup, setup.workload.batch(8))
    assert train_step(setup, setup.workload.batch(4)).isfinite()
