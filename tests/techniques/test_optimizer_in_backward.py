"""optimizer_in_backward: gradients never stand together, each weight is stepped once, the front is an optimizer."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recomputed

from autofit.core.errors import InputError, RefusedError
from autofit.core.workload import Hyperparameters, Workload
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.loop import train
from autofit.training.step import accumulate, train_step, update
from tests import tiny
from tests.techniques.contract import Effect

IN_BACKWARD = technique_named("optimizer_in_backward")
OPTIMIZERS = ("adamw", "adamw-foreach", "adamw-8bit", "adamw-4bit", "adamw-fp8", "adafactor", "sgd")


def shows(effect: Effect) -> None:
    """Nothing is left for after the backward, neither a gradient nor the update."""
    batch = effect.setup.workload.batch(4)
    before = {name: weight.detach().clone() for name, weight in effect.setup.trainable()}
    accumulate(effect.setup, batch)
    assert all(weight.grad is None for _, weight in effect.setup.trainable())
    assert all(not torch.equal(weight, before[name]) for name, weight in effect.setup.trainable())
    accumulate(effect.off, batch)
    assert all(weight.grad is not None for _, weight in effect.off.trainable())
    assert update(effect.setup)
    assert not update(effect.setup)
    one = effect.setup.optimizer.state
    assert {int(one[weight]["step"]) for _, weight in effect.setup.trainable()} == {1}


def run(
    workload: Workload, in_backward: bool, chosen: Hyperparameters | None = None, **knobs: Any
) -> Setup:
    """A run that starts from the same weights every time."""
    torch.manual_seed(0)
    config = {"optimizer_in_backward": in_backward, **knobs}
    return build(
        workload,
        config,
        tiny.CPU,
        model=workload.model(),
        hyperparameters=chosen or Hyperparameters(lr=1e-2),
    )


def assert_same_weights(one: Setup, other: Setup) -> None:
    for (name, left), (_, right) in zip(one.trainable(), other.trainable(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7, msg=name)


# The memory.


def wide_workload(width: int = 256, depth: int = 8) -> Workload:
    """Matrices of 256 KiB each, beside activations of 2 KiB: gradients are what memory is spent on."""
    return Workload(
        model=lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))),
        batch=lambda n: torch.randn(n, width, generator=torch.Generator().manual_seed(n)),
        loss=lambda model, batch: model(batch).square().mean(),
        effective_batch_size=2,
    )


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", 0), ("adamw", 2), ("adamw-8bit", 0.508)])
def test_the_peak_falls_by_all_gradients_but_one(optimizer: str, state: float) -> None:
    """State is the matrices' number of such matrices in bytes; activations are 1 % of one matrix a layer."""
    depth, matrix = 8, 4 * 256 * 256

    def peak(in_backward: bool) -> int:
        with StorageTracker() as tracker:
            setup = run(wide_workload(depth=depth), in_backward, optimizer=optimizer)
            batch = setup.workload.batch(2)
            train_step(setup, batch)
            tracker.reset_peak()
            train_step(setup, batch)
        return tracker.peak

    plain, in_backward = peak(False), peak(True)
    assert plain == pytest.approx((1 + 1 + state) * depth * matrix, rel=0.03)
    assert in_backward == pytest.approx((depth + 1 + state * depth) * matrix, rel=0.03)
    assert plain - in_backward == pytest.approx((depth - 1) * matrix, rel=0.02)


# Each weight is stepped once a step, as the plain optimizer would.


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_are_those_of_the_plain_optimizer(optimizer: str) -> None:
    """With tied weights, with weight decay on matrices alone, and with a rate that changes at every step."""
    workload = tiny.llama_workload(tie_word_embeddings=True)
    chosen = Hyperparameters(lr=1e-2, weight_decay=0.3, warmup_steps=2, schedule="linear")
    plain, front = (run(workload, each, chosen, optimizer=optimizer) for each in (False, True))
    batches = [workload.batch(4)] * 3
    losses = [
        [report.loss for report in train(setup, batches, steps=3)] for setup in (plain, front)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same_weights(plain, front)
    head = front.model.lm_head.weight
    assert head is front.model.get_input_embeddings().weight
    if optimizer != "sgd":
        assert {int(front.optimizer.state[weight]["step"]) for _, weight in front.trainable()} == {
            3
        }


def chunked_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss in slices of the sequence, whose logits are computed again in the one backward that there is."""
    hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1]
    labels = batch["labels"][:, 1:]

    def slice_loss(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            model.lm_head(part).flatten(0, 1), targets.flatten(), reduction="sum"
        )

    slices = zip(hidden.split(4, dim=1), labels.split(4, dim=1), strict=True)
    return (
        sum(recomputed(slice_loss, *each, use_reentrant=False) for each in slices) / labels.numel()
    )


def test_a_tied_head_under_a_chunked_loss_is_stepped_once() -> None:
    """Its gradient comes from every slice, and from the embedding."""
    whole = tiny.llama_workload(tie_word_embeddings=True)
    chunked = dataclasses.replace(whole, loss=chunked_loss)
    plain, front = run(whole, False), run(chunked, True)
    calls: Counter[nn.Parameter] = Counter()
    for _, weight in front.trainable():
        weight.register_post_accumulate_grad_hook(lambda each: calls.update([each]))
    for _ in range(2):
        losses = [train_step(setup, whole.batch(4)) for setup in (plain, front)]
    torch.testing.assert_close(losses[0], losses[1])
    assert set(calls.values()) == {2}
    for (_, left), (_, right) in zip(plain.trainable(), front.trainable(), strict=True):
        # slices add up in another order
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_with_checkpointing_and_adapters_it_steps_as_the_plain_optimizer() -> None:
    knobs = {"activation_checkpointing": "full", "lora_rank": 4, "precision": "bf16-mixed"}
    plain, front = (run(tiny.llama_workload(), each, **knobs) for each in (False, True))
    for _ in range(3):
        for setup in (plain, front):
            train_step(setup, setup.workload.batch(4))
    assert_same_weights(plain, front)


def test_a_second_backward_in_a_step_is_not_a_second_update() -> None:
    setup = run(tiny.mlp_workload(), True)
    accumulate(setup, setup.workload.batch(4))
    with pytest.raises(
        InputError, match=r"applied a gradient of out\.bias .* Set optimizer_in_backward to false\."
    ):
        accumulate(setup, setup.workload.batch(4))


def test_a_step_that_was_given_up_does_not_bar_the_next() -> None:
    setup = run(tiny.mlp_workload(), True)
    accumulate(setup, setup.workload.batch(4))
    setup.optimizer.zero_grad()
    accumulate(setup, setup.workload.batch(4))
    assert update(setup)


def test_a_batch_without_a_valid_label_is_no_step() -> None:
    workload = tiny.llama_workload()
    setup = run(workload, True)
    batch = {**workload.batch(4), "labels": torch.full((4, 16), -100)}
    accumulate(setup, batch)
    assert not update(setup)
    assert not setup.optimizer.state
    train_step(setup, workload.batch(4))
    assert evaluate(setup, [workload.batch(4)]) > 0


# The front.


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "adamw-4bit"])
def test_groups_and_state_are_the_inner_ones(optimizer: str) -> None:
    chosen = Hyperparameters(lr=0.02, weight_decay=0.3)
    setup = run(tiny.conv_workload(), True, chosen, optimizer=optimizer)
    groups = setup.optimizer.param_groups
    assert isinstance(setup.optimizer, torch.optim.Optimizer)
    assert Counter(id(p) for group in groups for p in group["params"]) == Counter(
        id(p) for _, p in setup.trainable()
    )
    assert {(group["params"][0].dim() >= 2, group["weight_decay"]) for group in groups} == {
        (True, 0.3),
        (False, 0.0),
    }
    before = {name: weight.detach().clone() for name, weight in setup.trainable()}
    for group in groups:
        group["lr"] = 0.0
    train_step(setup, setup.workload.batch(4))
    assert all(torch.equal(weight, before[name]) for name, weight in setup.trainable())
    assert setup.optimizer.state.keys() == {weight for _, weight in setup.trainable()}


def test_a_scheduler_of_torch_drives_it() -> None:
    setup = run(tiny.mlp_workload(), True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(setup.optimizer, factor=0.5, total_iters=10)
    assert {group["lr"] for group in setup.optimizer.param_groups} == {0.005}
    train_step(setup, setup.workload.batch(4))
    setup.optimizer.step()  # nothing is left for it to do
    assert {int(state["step"]) for state in setup.optimizer.state.values()} == {1}
    scheduler.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(tmp_path: Path, optimizer: str) -> None:
    workload = tiny.mlp_workload()
    first = run(workload, True, optimizer=optimizer)
    for _ in range(2):
        train_step(first, workload.batch(4))
    checkpoint.save(first, tmp_path, 2)
    second = run(workload, True, optimizer=optimizer)
    # all that a checkpoint holds is another now, in the middle of a step
    accumulate(second, workload.batch(3))
    assert checkpoint.load(second, tmp_path).next_step == 2
    for group in (*first.optimizer.param_groups, *second.optimizer.param_groups):
        group["lr"] = 3e-3
    assert [train_step(second, workload.batch(4)) for _ in range(2)] == [
        train_step(first, workload.batch(4)) for _ in range(2)
    ]
    for (_, one), (_, other) in zip(first.trainable(), second.trainable(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    """What they hold is laid out in another way."""
    checkpoint.save(run(tiny.mlp_workload(), True), tmp_path, 1)
    with pytest.raises(InputError, match="is of another model or config"):
        checkpoint.load(run(tiny.mlp_workload(), False), tmp_path)


def test_closing_gives_the_model_back() -> None:
    setup = run(tiny.mlp_workload(), True)
    train_step(setup, setup.workload.batch(4))
    before = {name: weight.detach().clone() for name, weight in setup.trainable()}
    setup.close()
    accumulate(setup, setup.workload.batch(4))
    for name, weight in setup.trainable():
        assert weight.grad is not None
        assert torch.equal(weight, before[name])


# What is refused.


@pytest.mark.parametrize(
    ("knobs", "remedy"),
    [
        ({"micro_batch_size": 2}, "set micro_batch_size to the whole 4."),
        ({"precision": "fp16-mixed"}, "use bf16-mixed."),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(knobs: dict[str, Any], remedy: str) -> None:
    workload = tiny.mlp_workload(4)
    config = canonicalize({"optimizer_in_backward": True, **knobs}, workload, tiny.CPU)
    assert refuse(config, workload, tiny.CPU).endswith(remedy)
    assert refuse(config.replace(optimizer_in_backward=False), workload, tiny.CPU) is None


def test_an_optimizer_on_the_host_is_refused_beside_it() -> None:
    workload = tiny.mlp_workload(4)
    config = canonicalize({"optimizer_in_backward": True}, workload, tiny.CPU).replace(
        optimizer_offload="cpu"
    )
    assert IN_BACKWARD.refuse(config, workload, tiny.CPU).startswith(
        "optimizer_offload steps on the host"
    )


def test_clipping_is_refused_and_the_model_left_alone() -> None:
    workload = tiny.mlp_workload()
    model = workload.model()
    chosen = Hyperparameters(max_grad_norm=1.0)
    with pytest.raises(
        RefusedError, match="leave out max_grad_norm, or set optimizer_in_backward to false"
    ):
        build(
            workload, {"optimizer_in_backward": True}, tiny.CPU, model=model, hyperparameters=chosen
        )
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())


@pytest.mark.gpu
# Inductor's own import of it
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "paged-adamw-8bit"])
def test_on_the_gpu(optimizer: str) -> None:
    """There the hooks run in a thread of autograd's own."""
    hardware, workload = detect("cuda"), wide_workload(width=1024)
    if optimizer not in technique_named("optimizer").choices(hardware):
        pytest.skip("this card has no fp8")
    peaks, weights = [], []
    for in_backward in (False, True):
        config = {"optimizer_in_backward": in_backward, "optimizer": optimizer}
        setup = build(workload, config, hardware, hyperparameters=Hyperparameters(lr=1e-3))
        for _ in range(2):
            train_step(setup, workload.batch(2))
        torch.cuda.reset_peak_memory_stats()
        floor = torch.cuda.memory_allocated()
        accumulate(setup, workload.batch(2))
        peaks.append(torch.cuda.max_memory_allocated() - floor)
        update(setup)
        weights.append([weight.detach().cpu() for _, weight in setup.trainable()])
        del setup
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    # whose step needs no temporary of the weight's size
    if optimizer in ("adamw", "sgd", "adamw-8bit"):
        assert peaks[0] - peaks[1] == pytest.approx(7 * 4 * 1024 * 1024, rel=0.1)
