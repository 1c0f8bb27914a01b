"""One training from build to the saved model: what is told, and what a run survives."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from autofit.core.errors import DivergedError, InputError, OutOfMemoryError
from autofit.core.hardware import Hardware
from autofit.core.workload import Hyperparameters
from autofit.hardware import segments
from autofit.training import checkpoint, prepared
from autofit.training.checkpoint_policy import CheckpointPolicy
from autofit.training.evaluation import EvaluationPlan
from autofit.training.loop import STOP, StepReport
from autofit.training.session import Session
from autofit.training.workload import workload_from
from tests import tiny

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int = 4, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(size, 48, generator=generator),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return tiny.MLP()


class Run:
    """A session and what it told."""

    def __init__(
        self,
        loader: Any = None,
        loss: Any = tiny.classify,
        model: nn.Module | None = None,
        loader_of_workload: Any = None,
        **kept: Any,
    ) -> None:
        self.told: list[str] = []
        self.loader = loader if loader is not None else batches()
        self.model = model or mlp()
        self.session = Session(
            workload=workload_from(self.model, loader_of_workload or batches(), loss),
            model=self.model,
            hyperparameters=Hyperparameters(lr=1e-2),
            policy=CheckpointPolicy(**kept),
            callbacks=(),
            listener=self.told.append,
        )

    def __call__(
        self, config: dict[str, Any] | None = None, steps: int = 8, **more: Any
    ) -> list[StepReport]:
        self.history, self.evaluations = self.session.run(
            config or {}, "cpu", self.loader, steps=steps, **more
        )
        return self.history


def out_of_memory_in_update(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """At one call, in the middle: the first weight is updated already."""
    calls: list[int] = []
    step = torch.optim.AdamW.step

    def torn(self: Any, closure: Any = None) -> None:
        calls.append(1)
        if len(calls) == at:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", torn)


def test_a_torn_update_goes_back_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Run()
    expected = plain()
    out_of_memory_in_update(monkeypatch, at=6)
    run = Run(directory=tmp_path, checkpoint_every=2)
    run()
    assert run.told == [
        "memory ran out in the update of step 6, which left weights half updated: training goes on from the checkpoint "
        "after 4 steps, with micro_batch_size 4, gradient_accumulation_steps 2, activation_checkpointing none."
    ]
    assert [report.step for report in run.history] == list(range(1, 9))
    assert [report.loss for report in run.history] == pytest.approx(
        [each.loss for each in expected], rel=1e-4
    )
    for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, 9))  # step 5 was done twice, and told of once


def test_what_is_evaluated_again_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory_in_update(monkeypatch, at=6)
    run = Run(batches(1), directory=tmp_path, checkpoint_every=3)
    run(evaluation=EvaluationPlan(batches(2)))
    assert len(run.evaluations) == len(run.history) == 8


def test_a_run_that_has_gone_further_is_told_of(tmp_path: Path) -> None:
    Run(directory=tmp_path)(steps=5)
    run = Run(directory=tmp_path, resume=True)
    assert [report.step for report in run(steps=3)] == [1, 2, 3, 4, 5]
    assert run.told == ["the run has done 5 steps already, more than the 3 it was to go on to."]


def test_a_torn_update_without_a_checkpoint_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory_in_update(monkeypatch, at=2)
    with pytest.raises(
        OutOfMemoryError, match=r"half updated, and there is no checkpoint to go back to\. Load the"
    ):
        Run()()


def test_memory_that_runs_out_outside_of_a_step_is_told() -> None:
    def full(*_: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(
        OutOfMemoryError, match=r"outside of a step: CUDA out of memory\. Search again within less"
    ):
        Run(loss=full)()


class Failing:
    """Fails once, at one batch of all, after it drew random numbers."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __iter__(self) -> Iterator[Batch]:
        for batch in batches():
            torch.rand(3)
            self.left -= 1
            if self.left == -1:
                raise OSError("the disk with the data is gone")
            yield batch

    def __len__(self) -> int:
        return 4


def dropping() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(tiny.MLP(), nn.Dropout(0.5))


@pytest.mark.parametrize("at", [3, 4, 6])
def test_what_was_trained_before_a_loader_fails_is_kept_to_the_bit(tmp_path: Path, at: int) -> None:
    """In the middle of a pass, and where the second one begins, for which random numbers are seeded."""
    whole = Run(Failing(99), model=dropping())()
    first = Run(Failing(at), model=dropping(), directory=tmp_path)
    with pytest.raises(OSError, match="the disk with the data is gone"):
        first()
    assert (
        f"OSError: the disk with the data is gone: the state after {at} steps is kept in"
        in first.told[-1]
    )
    again = Run(Failing(99), model=dropping(), directory=tmp_path, resume=True)
    assert [report.loss for report in again()] == [report.loss for report in whole]


class Dying(torch.utils.data.Dataset[Any]):
    """Kills the worker that reads it."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(48) * index, torch.tensor(index % 10)


def test_what_was_trained_before_a_worker_dies_is_kept(tmp_path: Path) -> None:
    dying = DataLoader(Dying(), batch_size=4, num_workers=1, prefetch_factor=1)
    run = Run(dying, loader_of_workload=batches(size=4), directory=tmp_path)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        run()
    assert checkpoint.exists(tmp_path)
    assert "is kept in" in run.told[-1]


def test_what_was_trained_before_a_loss_fails_is_kept(tmp_path: Path) -> None:
    calls: list[int] = []

    def failing(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise ArithmeticError("no such label")
        return tiny.classify(model, batch)

    run = Run(loss=failing, directory=tmp_path, checkpoint_every=100)
    with pytest.raises(ArithmeticError, match="no such label"):
        run(steps=100)
    (path,) = (tmp_path / "checkpoints").iterdir()
    done = int(path.name.removeprefix("step-"))
    assert done == len((tmp_path / "metrics.jsonl").read_text().splitlines()) > 0
    expected = Run()
    expected(steps=done)
    again = Run(directory=tmp_path, resume=True)
    again(steps=done)
    for mine, theirs in zip(again.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "content", ["micro_batch_size: two\n", "precision: bf16\n", "[]", "micro_batch_size: 0\n"]
)
def test_what_a_run_without_memory_left_is_checked_before_it_is_used(
    tmp_path: Path, content: str
) -> None:
    Run(directory=tmp_path)(steps=1)
    (tmp_path / "after-out-of-memory.yaml").write_text(content)
    with pytest.raises(InputError, match=r"after-out-of-memory\.yaml"):
        Run(directory=tmp_path, resume=True)()


def test_a_resumed_run_knows_that_memory_ran_out(tmp_path: Path) -> None:
    calls: list[int] = []

    def hungry(model: nn.Module, batch: Batch) -> torch.Tensor:
        calls.append(len(batch[0]))
        if len(batch[0]) > 2 and model.training and len(calls) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tiny.classify(model, batch)

    first = Run(loss=hungry, directory=tmp_path, checkpoint_every=2)
    first({"micro_batch_size": 8}, steps=4)
    assert any("micro-batch 8x1 -> 4x2" in text for text in first.told)
    split = yaml.safe_load((tmp_path / "after-out-of-memory.yaml").read_text())
    assert split["micro_batch_size"] == 2
    of_two_devices = {**split, "gradient_accumulation_steps": 2}
    (tmp_path / "after-out-of-memory.yaml").write_text(yaml.safe_dump(of_two_devices))
    calls.clear()
    again = Run(loss=hungry, directory=tmp_path, resume=True)
    again({"micro_batch_size": 8}, steps=8)
    assert "goes on with micro_batch_size 2, gradient_accumulation_steps 4" in again.told[0]
    assert set(calls[-4 * 4 :]) == {2}  # four steps, after the proof that the loss may be split


def test_a_loss_that_is_no_number_says_where_and_keeps_what_was_before(tmp_path: Path) -> None:
    bad = batches()
    bad[1][0].fill_(torch.nan)
    fine = batches()

    def loader() -> Iterator[Batch]:
        loader.passes += 1  # type: ignore[attr-defined]
        yield from (bad if loader.passes == 2 else fine)  # type: ignore[attr-defined]

    loader.passes = 0  # type: ignore[attr-defined]
    run = Run(loader, directory=tmp_path)
    with pytest.raises(DivergedError) as caught:
        run()
    assert caught.value.message == (
        f"the loss is nan at step 6 (batch 1 of pass 1); the state before it is kept in {tmp_path}."
    )
    assert caught.value.step == 6
    assert "Lower the learning rate" in caught.value.remedy
    assert checkpoint.exists(tmp_path)
    loader.passes = 0  # type: ignore[attr-defined]
    bad[1][0].fill_(0.5)  # mended
    resumed = Run(loader, directory=tmp_path, resume=True)
    assert [report.step for report in resumed()] == [*range(1, 9)]


def test_a_first_loss_that_is_no_number_is_not_blamed_on_the_learning_rate() -> None:
    bad = batches()
    bad[0][0].fill_(torch.nan)
    with pytest.raises(
        DivergedError, match=r"step 1 \(batch 0 of pass 0\)\. Check the data and the loss"
    ):
        Run(bad)()


def test_a_loader_that_is_too_slow_is_said_so() -> None:
    def slow() -> Iterator[Batch]:
        for batch in batches():
            time.sleep(0.05)
            yield batch

    run = Run(slow)
    run()
    assert len(run.told) == 1
    assert run.told[0].startswith("the loader is too slow for this device: ")
    quick = Run()
    quick()
    assert quick.told == []


def test_evaluations_are_in_the_metrics(tmp_path: Path) -> None:
    run = Run(directory=tmp_path)
    run(evaluation=EvaluationPlan(batches(2)))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["evaluation"]) for row in rows if "evaluation" in row] == [
        (4, run.evaluations[0]),
        (8, run.evaluations[1]),
    ]
    assert [row["loss"] for row in rows if "loss" in row] == [report.loss for report in run.history]


def test_batches_without_labels_are_told_of_once_and_counted() -> None:
    model = tiny.llama_workload().model()
    full, empty = tiny.padded_batch((4, 9)), tiny.padded_batch((1, 0))
    run = Run([full, empty, full, empty], loss=None, model=model, loader_of_workload=[full])
    run(steps=5)
    assert run.told == [
        "the batch of step 2 has no label that counts: nothing is learnt from it.",
        "the batches of 2 of 5 steps had no label that counts: nothing was learnt.",
    ]


def test_steps_that_the_loss_scaler_skips_are_counted_also_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.grad_scaler.GradScaler
    monkeypatch.setattr(
        torch.amp.grad_scaler, "GradScaler", lambda device: scaler(device, init_scale=2.0**20)
    )
    linear = Hyperparameters(lr=1e-2, schedule="linear", warmup_steps=2)

    def run(steps: int, **kept: Any) -> Run:
        made = Run(**kept)
        made.session = replace(
            made.session,
            hyperparameters=linear,
            callbacks=(lambda r: STOP if r.step == steps + 1 else 0,),
        )
        made({"precision": "fp16-mixed"}, steps=12)
        return made

    whole = run(12)
    skipped = [report.skipped for report in whole.history].count("overflow")
    assert 1 <= skipped <= 8
    assert whole.told == [
        f"the loss scaler of fp16-mixed skipped {skipped} of 12 steps, whose gradients overflowed: the schedule was "
        "held back for them."
    ]
    run(9, directory=tmp_path)
    assert run(12, directory=tmp_path, resume=True).history == whole.history


def test_a_callback_ends_training_with_all_that_an_end_leaves(tmp_path: Path) -> None:
    run = Run(directory=tmp_path)
    run.session = replace(
        run.session, callbacks=(lambda report: STOP if report.step == 3 else None,)
    )
    run(steps=20, evaluation=EvaluationPlan(batches(2)))
    assert [report.step for report in run.history] == [1, 2, 3]
    assert len(run.evaluations) == 1
    assert run.told[-1] == "a callback ended the training after 3 steps of 20."
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert [report.step for report in Run(directory=tmp_path, resume=True)(steps=5)] == [
        *range(1, 6)
    ]


def test_looking_at_the_loss_draws_nothing() -> None:
    """Whether a config is checked by splitting or not, training draws the same random numbers."""
    seen: list[float] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if model.training:
            seen.append(float(torch.rand(())))
        else:
            torch.rand(5)
        return tiny.classify(model, batch)

    Run(loss=loss)(steps=1)
    whole = seen[-1]
    Run(loss=loss)({"micro_batch_size": 4}, steps=1)
    assert seen[-2] == whole


def test_a_torn_update_can_go_on_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AnotherProcessError(Exception):
        pass

    def restart() -> NoReturn:
        raise AnotherProcessError

    out_of_memory_in_update(monkeypatch, at=2)
    run = Run(directory=tmp_path)
    run.session = replace(run.session, restart=restart)
    with pytest.raises(AnotherProcessError):
        run()
    assert run.told == [
        "memory ran out in the update of step 2, which left weights half updated: training goes on in a fresh process, "
        "from the last checkpoint."
    ]
    # there was none yet: from the start, in smaller slices
    again = Run(directory=tmp_path, resume=True)
    assert [report.step for report in again(steps=3)] == [1, 2, 3]
    assert "goes on with micro_batch_size 4" in again.told[0]


def test_on_a_card_memory_is_reserved_as_it_was_in_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the card, whose allocator has its settings in any build of PyTorch."""
    # the command line sets one for its process
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    set_to: list[str] = []
    monkeypatch.setattr(segments, "settings", lambda: set_to[-1] if set_to else "")
    card = SimpleNamespace(  # which the optimizer does not see: in a build with CUDA it would look for one
        is_available=lambda: True,
        get_allocator_backend=lambda: "native",
        is_initialized=lambda: False,
    )
    inside = SimpleNamespace(_accelerator_setAllocatorSettings=set_to.append)
    monkeypatch.setattr(segments, "torch", SimpleNamespace(cuda=card, _C=inside))
    monkeypatch.setattr(prepared, "detect", lambda _: tiny.CPU)
    run, seen = Run(), []
    run.session = replace(run.session, callbacks=(lambda _: seen.append(segments.settings()),))
    run.session.run({}, None, run.loader, steps=1)
    assert seen == ["expandable_segments:True"]
    assert segments.settings() == ""


def test_what_is_to_be_known_of_the_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(**vars(tiny.CPU))
    monkeypatch.setattr(prepared, "detect", lambda _: noted)
    run = Run()
    run(steps=1)
    assert run.told[0] == "segments do not grow."


class Noted(Hardware):
    notes = ("segments do not grow.",)
