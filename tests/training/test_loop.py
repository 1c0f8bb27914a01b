"""The loop: what a hand-written one does, reports, and steps that are done again when memory runs out."""

import math
import pickle
import re
import time
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autofit
from autofit.core.errors import DivergedError, InputError, OutOfMemoryError
from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import sample_count
from autofit.setup import Setup
from autofit.training import loss as losses
from autofit.training.build import build
from autofit.training.inspect import Prover
from autofit.training.loop import STOP, StepReport, learning_rate_factor, train
from tests import tiny


@pytest.mark.parametrize("micro", [8, 3])
def test_training_is_what_a_hand_written_loop_does(micro: int) -> None:
    """AdamW with decay on matrices only, clipping and a warmed-up cosine, over five steps."""
    workload = tiny.mlp_workload(8)
    chosen = Hyperparameters(
        lr=0.01, weight_decay=0.1, schedule="cosine", warmup_steps=2, max_grad_norm=0.5
    )
    batches = [tuple(tensor[:8] for tensor in workload.batch(8 + step)) for step in range(5)]

    model = tiny.living(workload)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (
                (step + 1) / 3 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 3))
            )
        loss = tiny.classify(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    setup = build(workload, {}, tiny.CPU, model=tiny.living(workload), hyperparameters=chosen)
    setup.micro_batch_size = micro
    reports = train(setup, batches, steps=5)
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(setup.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_every_step_is_reported_to_every_callback() -> None:
    workload = tiny.mlp_workload(4)
    setup = build(
        workload, {}, tiny.CPU, hyperparameters=Hyperparameters(lr=0.01, schedule="linear")
    )
    heard: list[StepReport] = []
    reports = train(
        setup, [workload.batch(4), workload.batch(3)] * 2, steps=4, callbacks=[heard.append]
    )
    assert heard == reports
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert [report.samples for report in reports] == [4, 3, 4, 3]
    assert [report.lr for report in reports] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_a_callback_ends_training_when_all_have_heard_of_the_step() -> None:
    workload = tiny.mlp_workload(4)
    heard: list[StepReport] = []

    def ends(report: StepReport) -> object:
        return STOP if report.step == 2 else None

    reports = train(
        build(workload, {}, tiny.CPU),
        [workload.batch(4)] * 5,
        steps=5,
        callbacks=[ends, heard.append],
    )
    assert [report.step for report in reports] == [1, 2]
    assert heard == reports


def test_stop_is_the_same_object_wherever_a_callback_runs() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(autofit.STOP)) is STOP
    assert pickle.loads(pickle.dumps(STOP)) is STOP


def test_the_schedule_waits_for_steps_that_the_loss_scaler_skips() -> None:
    workload = tiny.mlp_workload(4)
    chosen = Hyperparameters(lr=0.01, schedule="linear", warmup_steps=3)
    setup = build(workload, {"precision": "fp16-mixed"}, tiny.CPU, hyperparameters=chosen)
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    reports = train(setup, [workload.batch(4)] * 16, steps=16)
    skipped = [report.skipped for report in reports]
    overflows = skipped.count("overflow")
    assert skipped == ["overflow"] * overflows + [None] * (16 - overflows)
    assert 2 <= overflows <= 12
    assert setup.progress.skipped_updates == overflows
    updates = [max(0, step - overflows) for step in range(16)]
    assert [report.lr for report in reports] == [
        0.01 * learning_rate_factor(chosen, 16, step) for step in updates
    ]


def test_a_batch_without_a_label_changes_nothing_and_is_reported() -> None:
    chosen = Hyperparameters(lr=0.01, weight_decay=0.1, max_grad_norm=1.0)
    setup = build(tiny.llama_workload(), {}, tiny.CPU, hyperparameters=chosen)
    labelled, empty = tiny.padded_batch((4, 9)), tiny.padded_batch((1, 0))
    before: list[torch.Tensor] = []

    def copy(report: StepReport) -> None:
        before.extend(
            parameter.detach().clone() for parameter in setup.model.parameters() if report.step == 1
        )

    reports = train(setup, [labelled, empty], steps=2, callbacks=[copy])
    assert [report.skipped for report in reports] == [None, "no label"]
    assert [report.gradient_norm is None for report in reports] == [False, True]
    assert all(map(torch.equal, before, setup.model.parameters()))
    assert setup.progress.skipped_updates == 0


def test_going_on_in_the_middle_is_as_if_never_stopped() -> None:
    workload = tiny.mlp_workload(4)
    batches = [workload.batch(4), workload.batch(4), workload.batch(4)]

    def started() -> Setup:
        chosen = Hyperparameters(lr=0.01, schedule="linear")
        return build(workload, {}, tiny.CPU, model=tiny.living(workload), hyperparameters=chosen)

    whole, halves = started(), started()
    reports = train(whole, batches, steps=3)
    resumed = train(halves, batches[:1], steps=3, first_step=2)
    assert resumed[0].step == 3
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
    with pytest.raises(
        InputError, match=r"the data ended after 1 of 3 steps\. Give fewer steps, or more data\."
    ):
        train(build(workload, {}, tiny.CPU), [workload.batch(4)], steps=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_said_with_the_step_before_it_does_harm(value: float) -> None:
    workload = tiny.mlp_workload(4)
    good, bad = workload.batch(4), workload.batch(4)
    bad[0].fill_(value)
    setup = build(workload, {}, tiny.CPU)
    with pytest.raises(InputError, match=r"the loss is nan at step 2\. Lower the learning rate"):
        train(setup, [good, bad], steps=2)
    assert all(parameter.isfinite().all() for parameter in setup.model.parameters())


def test_the_time_that_data_takes_is_no_part_of_the_step() -> None:
    workload = tiny.mlp_workload(4)

    def slow() -> Any:
        for _ in range(2):
            time.sleep(0.05)
            yield workload.batch(4)

    for report in train(build(workload, {}, tiny.CPU), slow(), steps=2):
        assert report.data_seconds >= 0.05
        assert report.seconds > 0
    assert report.tokens is None
    llama = tiny.llama_workload()
    (report,) = train(build(llama, {}, tiny.CPU), [tiny.padded_batch((4, 9))], steps=1)
    assert report.tokens == 3 + 8


def test_the_norm_that_was_clipped_is_reported() -> None:
    workload = tiny.mlp_workload(4)
    setup = build(workload, {}, tiny.CPU, hyperparameters=Hyperparameters(max_grad_norm=0.1))
    (report,) = train(setup, [workload.batch(4)], steps=1)
    assert report.gradient_norm
    assert report.gradient_norm > 0.1


def test_a_backward_that_steps_does_not_step_for_a_loss_that_is_no_number() -> None:
    workload = tiny.mlp_workload(4)
    bad = workload.batch(4)
    bad[0].fill_(math.nan)
    setup = build(workload, {"optimizer_in_backward": True}, tiny.CPU)
    with pytest.raises(
        DivergedError, match=r"the loss is nan at step 1\. Check the data and the loss"
    ):
        train(setup, [bad], steps=1)
    assert all(parameter.isfinite().all() for parameter in setup.model.parameters())


# When memory runs out.


class Hungry:
    """A loss that runs out of memory at one call, or for more than so many samples from that call on."""

    def __init__(
        self, loss: Any, *, at: int, fits: int | None = None, phase: str = "forward"
    ) -> None:
        self.loss, self.at, self.fits, self.phase = loss, at, fits, phase
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        loss = self.loss(model, batch)
        samples = sample_count(batch)
        hungry = (
            self.calls == self.at
            if self.fits is None
            else self.calls >= self.at and samples > self.fits
        )
        if not (hungry and torch.is_grad_enabled()):
            return loss
        if self.phase == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return _Raises.apply(loss)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
        )


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(**batch) if isinstance(batch, dict) else tiny.classify(model, batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def trained(
    workload: Workload, config: dict[str, Any], loss: Any = None, steps: int = 4, hook: Any = None
) -> tuple[Setup, list, list[str]]:
    """Steps on batches of their own, from the same weights and random numbers."""
    torch.manual_seed(1)
    model = tiny.living(replace(workload, loss=None))
    setup = build(
        replace(workload, loss=loss),
        config,
        tiny.CPU,
        model=model,
        hyperparameters=Hyperparameters(lr=1e-3),
    )
    if hook is not None:
        setup.model.get_submodule("lm_head").register_forward_hook(hook)
    told: list[str] = []
    batches = [workload.batch(workload.effective_batch_size) for _ in range(steps)]
    torch.manual_seed(2)
    # Proven beforehand, since the loss that is trained runs out of memory whoever calls it.
    prover = Prover(replace(workload, loss=getattr(loss, "loss", model_loss)), tiny.CPU)
    return setup, train(setup, batches, steps=steps, listener=told.append, prover=prover), told


CASES = {
    "mlp": (tiny.mlp_workload, {}),
    "accumulating": (tiny.mlp_workload, {"micro_batch_size": 2}),
    "llama": (tiny.llama_workload, {}),
    "checkpointing": (tiny.llama_workload, {"activation_checkpointing": "full"}),
    "lora": (tiny.llama_workload, {"lora_rank": 4, "quantization": "nf4"}),
    "8-bit state": (tiny.llama_workload, {"optimizer": "adamw-8bit"}),
    "mixed": (tiny.llama_workload, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_ran_out_of_memory_is_done_again_in_smaller_slices(
    case: str, phase: str
) -> None:
    make, config = CASES[case]
    workload = make()
    whole = workload.effective_batch_size
    micro = config.get("micro_batch_size", whole)
    at = 2 * (whole // micro) + 1
    setup, reports, told = trained(
        workload, config, Hungry(model_loss, at=at, fits=micro // 2, phase=phase)
    )
    assert setup.micro_batch_size == setup.config["micro_batch_size"] == micro // 2
    assert setup.config["gradient_accumulation_steps"] == 2 * whole // micro
    (note,) = told
    cuts = f"{micro}x{whole // micro} -> {micro // 2}x{2 * whole // micro}"
    done = "the step is done again, from here on with micro-batch"
    assert note == f"memory ran out in the {phase} of step 3: {done} {cuts}."
    # What a run learns that had the smaller slices from the second step on.
    plain, expected, _ = trained(workload, config, model_loss)
    tolerance = 2e-2 if case in ("mixed", "lora", "8-bit state") else 1e-5
    assert [each.loss for each in reports] == pytest.approx(
        [each.loss for each in expected], rel=tolerance
    )
    assert [each.step for each in reports] == [1, 2, 3, 4]
    for (_, mine), (_, theirs) in zip(setup.trainable(), plain.trainable(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=2e-3)


def test_what_held_memory_is_told_where_the_error_says_what_was_asked_for() -> None:
    class Asking(Hungry):
        def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
            try:
                return super().__call__(model, batch)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 ..."
                ) from error

    _, _, (held, note) = trained(tiny.mlp_workload(), {}, Asking(model_loss, at=3, fits=2))
    assert held.startswith(
        "Memory ran out in the forward, where 3 GiB more did not fit; held were, in GiB, weights "
    )
    assert "optimizer" in held
    assert note.startswith("memory ran out in the forward of step 3: the step is done again")


def test_a_chunked_loss_is_taken_back_too() -> None:
    """Memory runs out in the middle of the chunks, when gradients of the head are there already."""
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")

    config = {"loss": "chunked", "lora_rank": 2, "lora_targets": "all-linear+head"}
    setup, reports, (note,) = trained(tiny.llama_workload(), config, hook=hook)
    assert "micro-batch 4x1 -> 2x2" in note
    _, expected, _ = trained(tiny.llama_workload(), config)
    assert [each.loss for each in reports] == pytest.approx(
        [each.loss for each in expected], rel=1e-5
    )
    assert setup.config["loss"] == "chunked"


class Noisy(nn.Module):
    """Keeps running statistics and draws random numbers in its forward, in blocks that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        parts = [
            nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Dropout(0.5)) for _ in range(2)
        ]
        self.blocks = nn.Sequential(*parts)
        self.out = nn.Linear(48, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(features))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_statistics_and_random_numbers_are_as_if_the_step_had_not_been_tried(phase: str) -> None:
    """With BatchNorm checkpointing comes first, which leaves the mathematics alone: bit for bit the same run."""
    workload = replace(tiny.mlp_workload(8), model=Noisy)
    setup, reports, (note,) = trained(workload, {}, Hungry(model_loss, at=3, phase=phase))
    assert "activation_checkpointing none -> full" in note
    plain, expected, _ = trained(workload, {}, model_loss)
    assert reports == expected
    mine, theirs = setup.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert int(mine["blocks.0.1.num_batches_tracked"]) == 4


def test_several_rungs_are_taken_at_once_and_only_divisors() -> None:
    setup, reports, told = trained(tiny.mlp_workload(12), {}, Hungry(model_loss, at=1, fits=1))
    assert setup.micro_batch_size == 1
    assert [note.partition("micro-batch ")[2] for note in told] == [
        "12x1 -> 6x2.",
        "6x2 -> 3x4.",
        "3x4 -> 1x12.",
    ]
    assert len(reports) == 4


def test_then_checkpointing_and_then_nothing_is_left() -> None:
    workload = tiny.llama_workload()
    config = {"micro_batch_size": 1, "activation_checkpointing": "alternate"}
    setup, _, (note,) = trained(workload, config, Hungry(model_loss, at=2, fits=None))
    assert note.endswith("with activation_checkpointing alternate -> full.")
    assert setup.config["activation_checkpointing"] == "full"
    with pytest.raises(
        OutOfMemoryError,
        match=r"in the forward of step 1, and nothing is left .* \(micro-batch 1\)",
    ):
        trained(workload, config, Hungry(model_loss, at=1, fits=0))


def test_a_loss_that_cannot_be_split_is_checkpointed_instead() -> None:
    def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(**batch).logits.mean(1)
        return nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))

    setup, _, (note,) = trained(tiny.llama_workload(), {}, Hungry(contrastive, at=2))
    assert "activation_checkpointing none -> full" in note
    assert setup.micro_batch_size == setup.workload.effective_batch_size


def test_what_the_new_config_costs_is_told() -> None:
    _, _, told = trained(tiny.mlp_workload(), {}, Hungry(model_loss, at=3, fits=2), steps=14)
    assert len(told) == 2
    assert re.fullmatch(r"a step takes \S+ s since then, \d+% (more|less) than before\.", told[1])


@pytest.mark.parametrize("in_backward", [False, True])
def test_weights_that_are_half_updated_are_not_trained_on(
    monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    workload = tiny.mlp_workload()
    if in_backward:
        with pytest.raises(
            OutOfMemoryError, match="in the backward of step 2, which left weights half"
        ) as caught:
            trained(
                workload,
                {"optimizer_in_backward": True},
                Hungry(model_loss, at=2, phase="backward"),
            )
    else:
        steps: list[int] = []
        step = torch.optim.AdamW.step

        def fails_once(self: Any, closure: Any = None) -> None:
            steps.append(1)
            if len(steps) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            step(self, closure)

        monkeypatch.setattr(torch.optim.AdamW, "step", fails_once)
        with pytest.raises(
            OutOfMemoryError, match="in the update of step 2, which left weights half"
        ) as caught:
            trained(workload, {}, model_loss)
    assert caught.value.torn
    assert caught.value.exit_code == 3


def test_the_first_update_has_no_state_that_could_be_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = torch.optim.AdamW.step

    def fails_once(self: Any, closure: Any = None) -> None:
        steps.append(1)
        if len(steps) == 1:
            # some of it was made
            self.state[self.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, closure)

    expected = trained(tiny.mlp_workload(), {"micro_batch_size": 2}, model_loss)[1]
    monkeypatch.setattr(torch.optim.AdamW, "step", fails_once)
    setup, reports, (note,) = trained(tiny.mlp_workload(), {}, model_loss)
    assert "memory ran out in the update of step 1: the step is done again" in note
    assert [each.loss for each in reports] == pytest.approx(
        [each.loss for each in expected], rel=1e-5
    )
    assert setup.micro_batch_size == 2


def test_other_errors_are_nobodys_to_mend() -> None:
    def wrong(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("memory of an elephant")

    with pytest.raises(ValueError, match="elephant"):
        trained(tiny.mlp_workload(), {}, wrong)


def test_memory_that_runs_out_while_data_moves_to_the_device_tears_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step before ended with its update, which is no part of this one."""
    move, calls = losses.map_tensors, []

    def hungry(batch: Any, function: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return move(batch, function)

    monkeypatch.setattr(losses, "map_tensors", hungry)
    _, reports, told = trained(tiny.mlp_workload(), {}, model_loss)
    done = "the step is done again, from here on with micro-batch 4x1 -> 2x2."
    assert told == [f"memory ran out in the forward of step 3: {done}"]
    assert len(reports) == 4


def test_a_loss_that_is_no_number_leaves_running_statistics_as_they_were() -> None:
    setup = build(tiny.conv_workload(), {}, tiny.CPU, model=tiny.living(tiny.conv_workload()))
    fine = setup.workload.batch(4)
    train(setup, [fine], steps=1)
    before = {name: buffer.clone() for name, buffer in setup.model.named_buffers()}
    with pytest.raises(DivergedError):
        train(setup, [(torch.full_like(fine[0], torch.nan), fine[1])], steps=1)
    for name, buffer in setup.model.named_buffers():
        assert torch.equal(buffer, before[name]), name


# The learning rate.


def test_warm_up_rises_in_a_line_to_the_whole() -> None:
    chosen = Hyperparameters(warmup_steps=4)
    assert [learning_rate_factor(chosen, 10, step) for step in range(6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    chosen = Hyperparameters(schedule=schedule)
    assert [learning_rate_factor(chosen, 4, step) for step in range(5)] == pytest.approx(
        expected, abs=1e-6
    )


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    total=st.integers(1, 60),
)
def test_the_factor_is_never_outside_its_range_and_falls_after_the_warm_up(
    schedule: str, warmup: int, total: int
) -> None:
    chosen = Hyperparameters(schedule=schedule, warmup_steps=warmup)
    course = [learning_rate_factor(chosen, total, step) for step in range(total)]
    assert all(0 < value <= 1 for value in course)  # every step that is taken learns something
    assert course[:warmup] == sorted(course[:warmup])
    assert course[warmup:] == sorted(course[warmup:], reverse=True)
