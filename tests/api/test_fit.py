"""fit trains the user's own model as a loop written by hand would, and goes on where it was stopped."""

import copy
import importlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autofit
from autofit.api.fit import fit
from autofit.api.search import search
from autofit.core.config import Config
from autofit.core.errors import InputError, NothingFitsError, ProbeError
from autofit.core.events import Event, Note, SearchStarted
from autofit.core.measurement import Outcome
from autofit.core.result import Result, SavedResult
from autofit.training.loop import StepReport
from autofit.tuning import run as tune
from tests import tiny

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(count: int = 3, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(count)
    return [
        (torch.randn(size, 48, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(count)
    ]


def mlp(depth: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return tiny.MLP(depth=depth)


def fitted(model: nn.Module | None = None, loader: Any = None, **options: Any) -> autofit.Trained:
    """Training only, on the CPU, with every knob off unless the config says otherwise."""
    given = {"loss": tiny.classify, "lr": 1e-2, "config": {}, "device": "cpu", **options}
    return fit(mlp() if model is None else model, batches() if loader is None else loader, **given)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], **tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


# The mathematics


def test_the_users_own_model_is_trained() -> None:
    model = mlp()
    parameters = list(model.parameters())
    trained = fitted(model, epochs=20)
    assert trained.model is model
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert trained.result is None
    assert trained.evaluations == []
    assert [report.step for report in trained.history] == list(range(60))
    assert {report.samples for report in trained.history} == {8}
    assert trained.history[-1].loss < 0.5 * trained.history[0].loss


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_knobs_it_is_the_loop_written_by_hand_bit_for_bit(decay: float) -> None:
    model = mlp()
    trained = fitted(copy.deepcopy(model), epochs=3, weight_decay=decay)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    losses = []
    for batch in batches() * 3:
        loss = tiny.classify(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert [report.loss for report in trained.history] == losses
    assert_same(weights(trained.model), weights(model))


@pytest.mark.parametrize(
    "knobs",
    [
        {"micro_batch_size": 2},
        {"micro_batch_size": 1, "activation_checkpointing": "full"},
        {"activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_exact_knobs_give_the_same_weights(knobs: dict[str, Any]) -> None:
    plain = fitted(config={"optimizer": "sgd"}, epochs=3, max_grad_norm=0.5)
    other = fitted(config=Config({"optimizer": "sgd", **knobs}), epochs=3, max_grad_norm=0.5)
    assert_same(weights(other.model), weights(plain.model), rtol=1e-5, atol=1e-6)
    for one, two in zip(plain.history, other.history, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-5)


def test_a_search_for_clipped_training_leaves_out_steps_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be refused when training begins: clipping by the global norm needs all gradients at once."""
    asked = []

    def run_search(workload: Any, options: Any, listener: Any) -> Any:
        asked.append(dict(options.set))
        raise NothingFitsError("as far as this test goes.")

    monkeypatch.setattr(importlib.import_module("autofit.api.fit"), "run_search", run_search)
    for given in ({}, {"set": {"precision": "fp32"}}, {"max_grad_norm": None}):
        with pytest.raises(NothingFitsError):
            fit(mlp(), batches(), loss=tiny.classify, lr=1e-2, **{"max_grad_norm": 1.0, **given})
    assert asked == [
        {"optimizer_in_backward": (False,)},
        {"optimizer_in_backward": (False,), "precision": ("fp32",)},
        {},
    ]


def test_a_ragged_last_batch_is_trained_on_too() -> None:
    loader = DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*batches(3), strict=True))), batch_size=9)
    trained = fitted(loader=loader, config={"micro_batch_size": 3})
    assert [report.samples for report in trained.history] == [9, 9, 6]


def test_the_model_is_given_back_without_wrappers() -> None:
    model = mlp()
    fitted(model, config={"activation_checkpointing": "full", "precision": "bf16"}, steps=1)
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_failure_gives_the_model_back_without_wrappers_too() -> None:
    model = mlp()

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(model, config={"activation_checkpointing": "full"}, callbacks=(stop,))
    assert not any("forward" in vars(module) for module in model.modules())


def test_batch_norm_is_warned_of() -> None:
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3]))]
    for micro_batch, warned in ((2, 1), (4, 0)):
        events: list[Event] = []
        fitted(tiny.ConvNet(), loader, config={"micro_batch_size": micro_batch}, listener=events.append)
        notes = [event.text for event in events if isinstance(event, Note)]
        assert len(notes) == warned
        assert all("BatchNorm takes its statistics over micro-batches of 2" in note for note in notes)


def contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Every sample is told from all others in the batch."""
    vectors = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(vectors @ vectors.T * 5, torch.arange(len(vectors)))


def test_a_loss_that_couples_samples_is_not_split() -> None:
    with pytest.raises(InputError, match=r"cannot be split.* Set micro_batch_size to 8"):
        fitted(loss=contrastive, config={"micro_batch_size": 4})
    assert len(fitted(loss=contrastive, config={"micro_batch_size": 8}).history) == 3


# How long, how fast


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 3), ({"epochs": 2}, 6), ({"steps": 2}, 2), ({"steps": 7}, 7)], ids=str
)
def test_length_of_training(given: dict[str, int], steps: int) -> None:
    assert len(fitted(**given).history) == steps


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 1, "steps": 1}, "epochs and steps both say how long"),
        ({"epochs": 0}, "must be a positive whole number, not 0"),
        ({"steps": -1}, "must be a positive whole number, not -1"),
        ({"steps": 1.5}, r"must be a positive whole number, not 1\.5"),
        ({"steps": True}, "must be a positive whole number, not True"),
    ],
    ids=str,
)
def test_lengths_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fitted(**given)


def test_a_loader_without_a_length_is_counted() -> None:
    def read() -> Iterator[Batch]:
        yield from batches()

    assert len(fitted(loader=read, epochs=2).history) == 6


class Drained:
    """Can be read again, but gives nothing any more."""

    def __init__(self) -> None:
        self.rest = iter(batches())

    def __iter__(self) -> Iterator[Batch]:
        yield from self.rest


@pytest.mark.parametrize("length", [{}, {"steps": 2}], ids=str)
def test_a_loader_that_one_look_used_up(length: dict[str, int]) -> None:
    with pytest.raises(InputError, match="gave no batch: it is empty, or can be read only once"):
        fitted(loader=Drained(), **length)


def test_a_learning_rate_that_nobody_gave_is_told() -> None:
    def told(**given: float) -> list[str]:
        events: list[Event] = []
        trained = fit(
            mlp(), batches(), loss=tiny.classify, config={}, device="cpu", steps=1, listener=events.append, **given
        )
        assert [report.lr for report in trained.history] == [1e-4]
        return [event.text for event in events if isinstance(event, Note)]

    assert told() == ["lr is not given: the learning rate is 0.0001."]
    assert told(lr=float("1e-4")) == []


def test_schedules() -> None:
    def rates(**given: Any) -> list[float]:
        return [report.lr for report in fitted(steps=5, lr=1.0, config={"optimizer": "sgd"}, **given).history]

    assert rates() == [1.0] * 5
    assert rates(schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(schedule="cosine", warmup_steps=1) == pytest.approx([0.5, 1.0, 0.853553, 0.5, 0.146447], abs=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 0}, "learning rate must be positive, not 0"),
        ({"schedule": "exponential"}, "schedule must be one of constant, cosine, linear"),
        ({"max_grad_norm": -1}, "max_grad_norm must be positive"),
        ({"config": {"precison": "bf16"}}, r"unknown knob 'precison'\. Did you mean 'precision'\?"),
        ({"config": {"precision": "bf17"}}, r"unknown value for precision 'bf17'\. Did you mean 'bf16'\?"),
        ({"config": {"micro_batch_size": 3}}, r"micro_batch_size 3 does not divide the effective batch of 8"),
        ({"learning_rate": 1}, r"unknown option 'learning_rate'"),
        ({"devise": "cpu"}, r"unknown option 'devise'\. Did you mean 'device'\?"),
        ({"resume": True}, "to resume, the directory must be named"),
        ({"loader": []}, "the loader is empty"),
        ({"loader": iter(batches())}, "can be read only once"),
        ({"loader": 5}, "the loader must be an iterable of batches, not a int"),
        ({"model": "gpt2"}, "the model must be an nn.Module or the name of one, not a str"),
        ({"loss": lambda model, batch: model(batch[0])}, r"the loss must be one number in a tensor, not a tensor of"),
        ({"loss": lambda model, batch: torch.ones(())}, "the loss needs no gradient"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(next(iter(value))),
)
def test_bad_input_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        fitted(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ProbeError, match="no CUDA device"):
        fitted(device="cuda")


def test_evaluation_after_every_pass_and_at_the_end() -> None:
    held_out = batches(2, 5)
    model = mlp()
    before = float(torch.stack([tiny.classify(model, batch).detach() for batch in held_out]).mean())
    trained = fitted(model, steps=7, eval_loader=held_out, lr=1e-9)
    assert trained.evaluations == [pytest.approx(before, abs=1e-4)] * 3
    assert len(fitted(steps=6, eval_loader=held_out).evaluations) == 2
    assert model.training


def test_callbacks_are_told_of_every_step() -> None:
    seen: list[StepReport] = []
    trained = fitted(epochs=2, callbacks=(seen.append, lambda report: None))
    assert seen == trained.history


# What is kept, and going on


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fitted()
    assert not list(tmp_path.iterdir())


def test_the_output_directory(tmp_path: Path) -> None:
    trained = fitted(output_dir=tmp_path / "out")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        *(f"out/checkpoints/step-00000003/{name}" for name in ("checkpoint.yaml", "state.pt")),
        *(f"out/checkpoints/step-00000003/{name}.safetensors" for name in ("weights", "buffers")),
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


class Noisy(nn.Module):
    """Draws random numbers in every forward, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features)


def noisy() -> nn.Module:
    torch.manual_seed(2)
    return Noisy()


def shuffled() -> DataLoader[Any]:
    features, classes = (torch.cat(parts) for parts in zip(*batches(3), strict=True))
    return DataLoader(TensorDataset(features, classes), batch_size=8, shuffle=True)


class StoppedError(Exception):
    """Something from outside ends a training run."""


def stop_at(step: int) -> Callable[[StepReport], None]:
    def callback(report: StepReport) -> None:
        if report.step == step:
            raise StoppedError

    return callback


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
    assert [report.step for report in resumed.history] == list(range(stopped // 2 * 2, 9))
    assert resumed.history == whole.history[stopped // 2 * 2 :]
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
    assert resumed.history == whole.history[stopped:]
    assert_same(weights(resumed.model), weights(whole.model))
    assert loader.read == 3 + 9 - stopped  # a look at all of them comes first


def test_as_many_checkpoints_are_kept_as_are_asked_for(tmp_path: Path) -> None:
    fitted(output_dir=tmp_path, epochs=3, checkpoint_every=2, keep_last=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000008", "step-00000009"]


def test_a_damaged_checkpoint_is_told_of(tmp_path: Path) -> None:
    events: list[Event] = []
    fitted(output_dir=tmp_path, epochs=2, checkpoint_every=3)
    (tmp_path / "checkpoints" / "step-00000006" / "state.pt").unlink()
    again = fitted(output_dir=tmp_path, resume=True, epochs=2, listener=events.append)
    assert [report.step for report in again.history] == [3, 4, 5]
    assert any(isinstance(event, Note) and "of step 6 is damaged" in event.text for event in events)


def test_every_pass_of_a_shuffling_loader_has_an_order_of_its_own() -> None:
    firsts: list[float] = []

    def remember(model: nn.Module, batch: Batch) -> torch.Tensor:
        firsts.append(float(batch[0][0, 0]))
        return tiny.classify(model, batch)

    fitted(loader=shuffled(), loss=remember, epochs=2)
    trained = firsts[-6:]
    assert trained[:3] != trained[3:]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = fitted(output_dir=tmp_path)
    again = fitted(output_dir=tmp_path, resume=True)
    assert again.history == []
    assert_same(weights(again.model), weights(first.model))
    assert len(fitted(output_dir=tmp_path, resume=True, epochs=2).history) == 3


def test_resuming_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no run to resume in .*\. Leave out resume"):
        fitted(output_dir=tmp_path, resume=True)


def test_resuming_with_another_config(tmp_path: Path) -> None:
    fitted(output_dir=tmp_path)
    with pytest.raises(InputError, match="is of another model or config"):
        fitted(output_dir=tmp_path, resume=True, config={"optimizer": "sgd"}, epochs=2)


# How the model comes back


def asked(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> tuple[Any, str]:
    """The formats that are to be kept, and the space, as a search would be given them."""
    given: list[Any] = []

    def run_search(workload: Any, options: Any, listener: Any) -> Any:
        given.append((workload.keeps, options.space))
        raise NothingFitsError("as far as this test goes.")

    monkeypatch.setattr(importlib.import_module("autofit.api.fit"), "run_search", run_search)
    with pytest.raises(NothingFitsError):
        fitted(model, config=None, **options)
    return given[0]


def test_the_default_space_keeps_the_format_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, mlp().bfloat16()) == ((("bfloat16",), ()), "full")
    assert asked(monkeypatch, mlp(), set={"precision": "bf16"}) == (None, "full")
    assert asked(monkeypatch, mlp(), space="lora") == (None, "lora")


def test_a_model_comes_back_in_the_format_it_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SavedResult("noisy", {}, {}, {"device": "cpu"}, Config({"precision": "fp32"}), {})
    monkeypatch.setattr(importlib.import_module("autofit.api.fit"), "_result", lambda *_, **__: found)
    model = noisy().double()  # which no config trains in
    before = weights(model)
    loader = [(features.double(), classes) for features, classes in batches()]
    fitted(model, loader, config=None)
    after = weights(model)
    assert {name: each.dtype for name, each in after.items()} == {name: each.dtype for name, each in before.items()}
    assert not torch.equal(before["body.0.weight"], after["body.0.weight"])


def test_modules_come_back_in_the_mode_they_came_in() -> None:
    model = noisy().eval()
    model.body[2].train()
    trained = fitted(model, config={"lora_rank": 2})
    assert [module.training for module in model.body] == [False, False, True, False]
    assert not trained.model.training
    model.train()
    model.body[1].eval()

    def stop(report: StepReport) -> None:
        assert model.body[1].training
        raise StoppedError

    with pytest.raises(StoppedError):
        fitted(model, callbacks=(stop,))
    assert [module.training for module in model.body] == [True, False, True, True]


def test_gradients_from_before_have_no_part_in_the_first_step() -> None:
    model, expected = mlp(), fitted(steps=2).history
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert fitted(model, steps=2).history == expected
    assert all(parameter.grad is None for parameter in model.parameters())


# With a search before it


@pytest.mark.usefixtures("shared_zygote")
def test_a_search_does_not_touch_the_model(tmp_path: Path) -> None:
    model = noisy().eval()
    model.body[0].weight.requires_grad_(False)
    before, parameters = weights(model), list(model.parameters())
    result = search(
        model,
        batches(),
        loss=tiny.classify,
        device="cpu",
        mem=1,
        trials=2,
        set={"precision": "fp32"},
        out=tmp_path / "r",
    )
    assert result.best
    assert result.model == "Noisy"
    assert result.workload["effective_batch_size"] == 8
    assert_same(weights(model), before)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [parameter.requires_grad for parameter in parameters[:2]] == [False, True]
    assert not any(module.training or module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.usefixtures("shared_zygote")
def test_search_then_train_then_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"config": None, "mem": 1, "trials": 3, "epochs": 2, "set": {"micro_batch_size": [4, 8]}}
    model = mlp()
    with pytest.raises(StoppedError):  # after the search, before any checkpoint
        fitted(mlp(), output_dir=tmp_path, callbacks=(stop_at(0),), **how)
    trained = fitted(model, output_dir=tmp_path, search="always", **how)
    assert trained.model is model
    assert isinstance(trained.result, Result)
    assert trained.result.best
    assert trained.result.best.verified
    assert trained.result.run_directory == str(tmp_path / "search")
    assert len(trained.result.trials) == 3  # all of the first search, none measured twice
    assert len(trained.history) == 6
    monkeypatch.setattr(tune, "LocalExecutor", None)  # no search any more
    shutil.rmtree(tmp_path / "checkpoints")
    again = fitted(output_dir=tmp_path, resume=True, **how)
    assert isinstance(again.result, SavedResult)
    assert [report.loss for report in again.history] == [report.loss for report in trained.history]


@pytest.mark.usefixtures("shared_zygote")
def test_nothing_fits(tmp_path: Path) -> None:
    how = {"config": None, "mem": 1e-5, "trials": 2, "set": {"precision": "fp32", "micro_batch_size": 8}}
    with pytest.raises(NothingFitsError, match=r"no config that was tried fits 0\.00 GiB: the nearest needs") as caught:
        fitted(output_dir=tmp_path, **how)
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("shared_zygote")
def test_a_contrastive_loss_is_searched_unsplit(tmp_path: Path) -> None:
    events: list[Event] = []
    result = search(
        mlp(), batches(), loss=contrastive, device="cpu", mem=1, trials=2, out=tmp_path / "r", listener=events.append
    )
    assert result.skipped["refused"] > 0
    (started,) = (event for event in events if isinstance(event, SearchStarted))
    assert (started.space_size, started.refused) == (result.space_size, result.skipped["refused"])
    assert {trial.config["micro_batch_size"] for trial in result.trials} == {8}
    assert any(isinstance(event, Note) and "it cannot be split" in event.text for event in events)


@pytest.mark.usefixtures("shared_zygote")
def test_a_workload_of_ones_own(tmp_path: Path) -> None:
    result = autofit.search(tiny.mlp_workload(), device="cpu", mem=1, trials=1, out=tmp_path / "r")
    assert result.trials[0].outcome is Outcome.FITS
    assert "samples/s" in autofit.explain(result)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: search(tiny.mlp_workload(), batches()), "a loader and a loss belong to a living model"),
        (lambda: search("gpt2", loss=tiny.classify), "a loader and a loss belong to a living model"),
        (lambda: search(tiny.mlp_workload(), seq_len=8), "seq_len and effective_batch belong to a model given by name"),
        (lambda: search(mlp(), batches(), effective_batch=8), "seq_len and effective_batch belong"),
        (lambda: search("gpt3"), r"unknown model 'gpt3'\. Did you mean 'gpt2'"),
        (lambda: search("gpt2", trails=3), r"unknown option 'trails'\. Did you mean 'trials'"),
        (lambda: search("gpt2", mem=0), "the memory must be more than 0 GiB"),
        (lambda: search(mlp(), []), "the loader is empty"),
        (lambda: search(object(), batches()), "must be an nn.Module or the name of one, not a object"),
    ],
)
def test_bad_input_to_a_search(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


# What is given wrongly


class Endless(torch.utils.data.IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        yield from batches(2)


def test_an_iterable_dataset_is_counted_by_reading_it() -> None:
    trained = fitted(loader=DataLoader(Endless(), batch_size=None), epochs=2)
    assert len(trained.history) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": [1]}, "config must be an autofit.Config or a mapping of knobs, not a list"),
        ({"callbacks": print}, "callbacks must be a tuple of functions, not one function"),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number from 1, not 0"),
        ({"keep_last": 1.5}, r"keep_last must be a whole number from 1, not 1\.5"),
        ({"callbacks": [3]}, r"callbacks must be a tuple of functions, not \[3\]"),
        ({"callbacks": 3}, "callbacks must be a tuple of functions, not 3"),
        ({"seed": None}, "seed must be a whole number of at most 63 bits, not None"),
        ({"seed": 2**70}, "seed must be a whole number of at most 63 bits"),
        ({"model": mlp().requires_grad_(False)}, r"the model has no trainable parameter\. Set requires_grad"),
        ({"eval_loader": iter(batches())}, "the eval_loader is a list_iterator, which can be read only once"),
        ({"eval_loader": []}, "eval_loader is empty: it gave no batch"),
        ({"eval_loader": [torch.ones(2, 48)]}, "the loss on eval_loader's first sample raised ValueError: not enough"),
        ({"output_dir": Path(__file__) / "x"}, "x cannot be written to: Not a directory"),
    ],
)
def test_what_could_only_fail_later_is_told_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted(**options)


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    fitted(output_dir=tmp_path, steps=1)
    with pytest.raises(InputError, match="already holds a training run"):
        fitted(output_dir=tmp_path, steps=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a directory"):
        fitted(output_dir=tmp_path / "file", steps=1)


# A search that was done before


@pytest.mark.usefixtures("shared_zygote")
def test_the_same_search_is_not_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events: list[Event] = []
    how: dict[str, Any] = {"config": None, "mem": 1, "trials": 2, "set": {"precision": "fp32"}, "steps": 1}
    first = fitted(mlp(), **how)
    assert isinstance(first.result, Result)
    monkeypatch.setattr(tune, "LocalExecutor", None)  # no search any more
    again = fitted(mlp(), listener=events.append, **how)
    assert isinstance(again.result, SavedResult)
    assert again.result.config == first.result.best.config
    (note,) = [event.text for event in events if isinstance(event, Note)]
    before = r"a search for this model, data and machine was done before \([\d,]+ samples/s measured within 1\.00 GiB\)"
    assert re.match(before, note)
    with pytest.raises(TypeError):  # there is no executor
        fitted(mlp(), search="always", **how)


# An optimizer of one's own


def test_an_optimizer_is_a_name_or_a_function() -> None:
    def one(**how: Any) -> float:
        return fitted(steps=3, **how).history[-1].loss

    assert one(optimizer="sgd") == one(config={"optimizer": "sgd"}) != one()
    assert one(optimizer=torch.optim.NAdam) != one()
    assert one(optimizer=lambda groups: torch.optim.AdamW(groups, weight_decay=0.0)) == pytest.approx(one(), rel=1e-5)


@pytest.mark.usefixtures("shared_zygote")
def test_an_optimizer_of_ones_own_is_probed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"config": None, "mem": 1, "trials": 2, "set": {"precision": "fp32"}, "steps": 2}
    trained = fitted(optimizer=lambda groups: torch.optim.NAdam(groups), output_dir=tmp_path, **how)
    assert trained.result.best.config["optimizer"] is None


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SGD(mlp().parameters(), lr=1), "the name of one or a function that makes one, not a SGD"),
        (5, "the name of one or a function that makes one, not a int"),
        ("adam", r"unknown value for optimizer 'adam'\. Did you mean 'adamw'"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fitted(optimizer=optimizer)


def test_without_a_listener_notes_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3]))]
    fitted(tiny.ConvNet(), loader, config={"micro_batch_size": 2})
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("autofit", logging.WARNING)
    assert "BatchNorm takes its statistics" in text


def test_the_model_without_its_adapters() -> None:
    trained = fitted(config={"lora_rank": 2}, steps=2)
    features = batches(1)[0][0]
    plain = trained.merged()
    assert not any("lora_" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(plain(features), trained.model(features), rtol=1e-4, atol=1e-5)


def test_labels_of_a_wrong_shape_are_one_sentence() -> None:
    loader = [(features, classes.float()) for features, classes in batches()]
    with pytest.raises(InputError, match=r"the loss raised RuntimeError: .* Correct it there"):
        fitted(loader=loader)


@pytest.mark.usefixtures("shared_zygote")
def test_a_resumed_run_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"config": None, "mem": 1, "trials": 2, "set": {"precision": "fp32"}, "steps": 2}
    fitted(**how)
    found = fitted(output_dir=tmp_path / "out", **how)
    assert not (tmp_path / "out" / "search").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(tune, "LocalExecutor", None)
    again = fitted(output_dir=tmp_path / "out", resume=True, **{**how, "steps": 3})
    assert again.result == found.result
    assert len(again.history) == 1


def test_the_output_directory_is_where_it_was_when_training_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    fitted(output_dir="out", callbacks=(lambda report: os.chdir(tmp_path / "elsewhere"),))
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_model_that_cannot_be_copied_is_trained_with_a_config() -> None:
    model = mlp()
    model.lock = threading.Lock()
    assert fitted(model, steps=2).history == fitted(steps=2).history
    with pytest.raises(InputError, match="copying the model's structure raised TypeError"):
        fitted(model, config=None)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_around_it(mode: Callable[[], Any]) -> None:
    expected, model, loader = fitted().history, mlp(), batches()
    with mode():
        assert fitted(model, loader).history == expected


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
        ({"optimizer": WithThing}, "the state_dict of the optimizer holds more than plain values and tensors"),
        ({"model": Counting()}, "_extra_state of the model's state is no tensor, and safetensors holds no other"),
        ({"model": sparse()}, "graph is a sparse tensor, which safetensors cannot hold"),
    ],
)
def test_what_could_not_be_kept_is_told_before_training(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted(output_dir=tmp_path, callbacks=(lambda report: pytest.fail("training began"),), **options)
    assert fitted(**options).history


def test_an_optimizer_without_weight_decay_is_resumed(tmp_path: Path) -> None:
    def rprop(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Rprop([parameter for group in groups for parameter in group["params"]])

    expected = fitted(optimizer=rprop, steps=4).history
    fitted(optimizer=rprop, steps=2, output_dir=tmp_path)
    assert fitted(optimizer=rprop, steps=4, output_dir=tmp_path, resume=True).history == expected[2:]
