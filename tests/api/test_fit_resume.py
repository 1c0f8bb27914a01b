"""fit's output directory: what is saved in it, and how a run is resumed from it."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autofit.core.errors import InputError
from autofit.core.events import Event, Note
from autofit.training.loop import StepReport
from tests import tiny
from tests.api.fitting import (
    Batch,
    StoppedError,
    assert_same,
    batches,
    fitted,
    mlp,
    noisy,
    shuffled,
    stop_at,
    weights,
)
from tests.processes import signals_by_default


def test_without_a_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fitted()
    assert not list(tmp_path.iterdir())


def test_the_output_directory(tmp_path: Path) -> None:
    trained = fitted(output_dir=tmp_path / "out")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        *(
            f"out/checkpoints/step-00000003/{name}"
            for name in ("checkpoint.yaml", "state.json", "optimizer.pt")
        ),
        *(f"out/checkpoints/step-00000003/{name}.safetensors" for name in ("weights", "buffers")),
        "out/.lock",
        "out/metrics.jsonl",
        "out/model/model.safetensors",
    }
    read = mlp()
    safetensors.torch.load_model(read, tmp_path / "out" / "model" / "model.safetensors")
    assert_same(weights(read), weights(trained.model))


def test_an_adapter_is_kept_as_an_adapter(tmp_path: Path) -> None:
    fitted(config={"lora_rank": 2}, output_dir=tmp_path)
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


@pytest.mark.parametrize("stopped", [4, 6, 8], ids=["in a pass", "after a pass", "before the end"])
@pytest.mark.parametrize("loader", [batches, shuffled])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, loader: Callable[[], Any], stopped: int
) -> None:
    how: dict[str, Any] = {
        "epochs": 3,
        "schedule": "cosine",
        "config": {"micro_batch_size": 4},
        "checkpoint_every": 2,
        "eval_loader": shuffled(),
    }
    whole = fitted(noisy(), loader(), **how)
    with pytest.raises(StoppedError):
        fitted(noisy(), loader(), output_dir=tmp_path, callbacks=(stop_at(stopped),), **how)
    torch.manual_seed(99)  # another process has drawn other random numbers
    resumed = fitted(noisy(), loader(), output_dir=tmp_path, resume=True, **how)
    assert resumed.history == whole.history
    assert_same(weights(resumed.model), weights(whole.model))


class Placed:
    """A loader that tells and takes its place, as torchdata's StatefulDataLoader does, and counts what it reads."""

    def __init__(self) -> None:
        self.place, self.read = 0, 0

    def __iter__(self) -> Iterator[Batch]:
        start, self.place = self.place, 0
        for self.place, batch in enumerate(batches()[start:], start + 1):
            self.read += 1
            yield batch
        self.place = 0

    def __len__(self) -> int:
        return 3

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("stopped", [4, 6])
def test_a_loader_that_tells_its_place_is_put_there(tmp_path: Path, stopped: int) -> None:
    how: dict[str, Any] = {"epochs": 3, "checkpoint_every": 2}
    whole = fitted(noisy(), Placed(), **how)
    with pytest.raises(StoppedError):
        fitted(noisy(), Placed(), output_dir=tmp_path, callbacks=(stop_at(stopped),), **how)
    loader = Placed()
    resumed = fitted(noisy(), loader, output_dir=tmp_path, resume=True, **how)
    assert resumed.history == whole.history
    assert_same(weights(resumed.model), weights(whole.model))
    assert loader.read == 3 + 9 - stopped  # a look at all of them comes first


class Odd(Placed):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "folder": Path("x")}


def test_a_place_that_cannot_be_written_down_is_counted_instead(tmp_path: Path) -> None:
    events: list[Event] = []
    how: dict[str, Any] = {"epochs": 3, "checkpoint_every": 2, "output_dir": tmp_path}
    whole = fitted(noisy(), Odd(), epochs=3)
    with pytest.raises(StoppedError):
        fitted(noisy(), Odd(), callbacks=(stop_at(4),), listener=events.append, **how)
    told = [
        event.text for event in events if isinstance(event, Note) and "state_dict" in event.text
    ]
    assert len(told) == 1
    assert "the state_dict of the loader holds a PosixPath, which no checkpoint does" in told[0]
    resumed = fitted(noisy(), Odd(), resume=True, **how)
    assert resumed.history == whole.history


@pytest.mark.parametrize(("size", "steps"), [(3, 3 + 7 + 11), (8, 3 + 3 + 4), (12, 3 + 2 + 3)])
def test_a_run_goes_on_at_its_sample_with_another_batch_size(
    tmp_path: Path, size: int, steps: int
) -> None:
    """32 samples in batches of 4, of which 3 were trained on; two epochs stay two epochs."""
    seen: list[int] = []
    said: list[Any] = []
    models: list[nn.Module] = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if model.training and model is models[-1]:  # not a copy that the loss is tried on
            seen.extend(batch[0][:, 0].int().tolist())
        return (model(batch[0]) ** 2).mean()

    def run(batch_size: int, **options: Any) -> Any:
        torch.manual_seed(0)
        data = DataLoader(TensorDataset(torch.arange(32.0).view(-1, 1)), batch_size=batch_size)
        given = {
            "config": {"optimizer": "sgd"},
            "lr": 1e-6,
            "epochs": 2,
            "output_dir": tmp_path,
            **options,
        }
        models.append(nn.Linear(1, 1))
        return fitted(models[-1], data, loss=loss, **given)

    with pytest.raises(StoppedError):
        run(4, checkpoint_every=3, callbacks=(stop_at(4),))
    seen.clear()
    held_out = [[torch.ones(2, 1)]]
    resumed = run(size, resume=True, listener=said.append, eval_loader=held_out)
    assert seen == [*range(12, 32), *range(32)]
    assert [report.step for report in resumed.history] == list(range(1, steps + 1))
    assert len(resumed.evaluations) == 2  # after each pass
    told = [event.text for event in said]
    assert f"for 2 epochs in all the run ends after {steps} steps." in told
    assert any("training goes on within a batch" in text for text in told) == (size == 8)


def test_as_many_checkpoints_are_kept_as_are_asked_for(tmp_path: Path) -> None:
    fitted(output_dir=tmp_path, epochs=3, checkpoint_every=2, keep_last=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000008", "step-00000009"]


def test_a_damaged_checkpoint_is_told_of(tmp_path: Path) -> None:
    events: list[Event] = []
    fitted(output_dir=tmp_path, epochs=2, checkpoint_every=3)
    (tmp_path / "checkpoints" / "step-00000006" / "state.json").unlink()
    again = fitted(output_dir=tmp_path, resume=True, epochs=2, listener=events.append)
    assert [report.step for report in again.history] == [*range(1, 7)]
    assert any(isinstance(event, Note) and "of step 6 is damaged" in event.text for event in events)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = fitted(output_dir=tmp_path)
    killed = tmp_path / "checkpoints" / ".step-00000002.gone"  # while it was removed
    killed.mkdir()
    again = fitted(output_dir=tmp_path, resume=True)
    assert not killed.exists()
    assert again.history == first.history
    assert_same(weights(again.model), weights(first.model))
    assert len(fitted(output_dir=tmp_path, resume=True, epochs=2).history) == 6


def test_resuming_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run to resume in .*\. Leave out resume"):
        fitted(output_dir=tmp_path / "none", resume=True)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    whole = fitted(output_dir=tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"st')
    said: list[Any] = []
    anew = fitted(output_dir=tmp_path / "killed", resume=True, listener=said.append)
    assert "there is no checkpoint in" in " ".join(each.text for each in said)
    assert_same(weights(anew.model), weights(whole.model))
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 3


def test_two_trainings_do_not_share_a_directory(tmp_path: Path) -> None:
    def second(_: StepReport) -> None:
        with pytest.raises(InputError, match="is in use by another training"):
            fitted(output_dir=tmp_path)

    assert len(fitted(output_dir=tmp_path, callbacks=(second,)).history) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint_before_it_acts(tmp_path: Path, number: signal.Signals) -> None:
    """But for SIGINT it would end the tests: what is done by default stands in for it."""
    whole, said, ended = fitted(), list[Any](), list[int]()

    def send(report: StepReport) -> None:
        if report.step == 2:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch, signals_by_default():
        if number != signal.SIGINT:
            patch.setattr("autofit.core.interrupts.signal.raise_signal", stop_instead(ended))
        with pytest.raises(KeyboardInterrupt):
            fitted(
                output_dir=tmp_path, checkpoint_every=1000, callbacks=(send,), listener=said.append
            )
        assert signal.getsignal(number) == (
            signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    assert ended == ([] if number == signal.SIGINT else [number])
    assert any("stopped: the state after 2 steps is kept in" in each.text for each in said)
    resumed = fitted(output_dir=tmp_path, resume=True)
    assert [report.step for report in resumed.history] == [1, 2, 3]
    assert_same(weights(resumed.model), weights(whole.model))


def stop_instead(ended: list[int]) -> Any:
    def raise_signal(number: int) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    return raise_signal


def test_resuming_with_another_config(tmp_path: Path) -> None:
    fitted(output_dir=tmp_path)
    with pytest.raises(InputError, match="is of another model or config"):
        fitted(output_dir=tmp_path, resume=True, config={"optimizer": "sgd"}, epochs=2)


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    fitted(output_dir=tmp_path, steps=1)
    with pytest.raises(InputError, match="already holds a training run"):
        fitted(output_dir=tmp_path, steps=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a directory"):
        fitted(output_dir=tmp_path / "file", steps=1)


def test_the_output_directory_is_where_it_was_when_training_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    fitted(output_dir="out", callbacks=(lambda report: os.chdir(tmp_path / "elsewhere"),))
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


class WithThing(torch.optim.SGD):
    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.param_groups[0]["thing"] = lambda: None


class Counting(tiny.MLP):
    def get_extra_state(self) -> Any:
        return {"calls": 0}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 0}


def sparse() -> nn.Module:
    model = mlp()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": WithThing},
            "the state_dict of the optimizer holds more than plain values and tensors",
        ),
        (
            {"model": Counting()},
            "_extra_state of the model's state is no tensor, and safetensors holds no other",
        ),
        ({"model": sparse()}, "graph is a sparse tensor, which safetensors cannot hold"),
    ],
)
def test_what_could_not_be_kept_is_told_before_training(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fitted(
            output_dir=tmp_path,
            callbacks=(lambda report: pytest.fail("training began"),),
            **options,
        )
    assert fitted(**options).history


def test_an_optimizer_without_weight_decay_is_resumed(tmp_path: Path) -> None:
    def rprop(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Rprop([parameter for group in groups for parameter in group["params"]])

    expected = fitted(optimizer=rprop, steps=4).history
    fitted(optimizer=rprop, steps=2, output_dir=tmp_path)
    assert fitted(optimizer=rprop, steps=4, output_dir=tmp_path, resume=True).history == expected
