"""A session on several devices, from a process of the user's: what travels there and back, and memory that runs out."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autofit.core.errors import InputError, OutOfMemoryError
from autofit.core.workload import Hyperparameters
from autofit.training import on_devices
from autofit.training.checkpoint_policy import CheckpointPolicy
from autofit.training.evaluation import EvaluationPlan
from autofit.training.loop import StepReport
from autofit.training.on_devices import run_on_devices
from autofit.training.session import Session
from autofit.training.workload import training_workload
from tests.tolerances import LOSS, assert_trained_alike

BATCH, STEPS = 8, 4
LR = 1e-2
FSDP = {"data_parallel": "fsdp"}


class Layers(nn.Module):
    """A stack of layers and a buffer that counts, the first and the last tied; runs out of memory where it is told."""

    def __init__(self, most: Path | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.register_buffer("seen", torch.zeros(()))
        self.most = most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_second = self.most and dist.is_initialized() and dist.get_rank() == 1
        if is_second and self.training and len(x) > int((self.most or Path()).read_text()):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.seen += self.training
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def made(most: Path | None = None) -> Layers:
    torch.manual_seed(0)
    return Layers(most)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(BATCH * STEPS, 8, generator=generator) for _ in range(2)))
    return DataLoader(data, BATCH, shuffle=True)


class Logged:
    """A callback that can travel."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, report: StepReport) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()} {report.step}\n")


def session(model: nn.Module, folder: Path | None = None, **given: Any) -> Session:
    policy = CheckpointPolicy(folder, checkpoint_every=1)
    workload = training_workload(model, loader(), loss)
    return Session(
        workload,
        model,
        Hyperparameters(lr=LR),
        policy,
        **{"callbacks": (), "listener": print, **given},
    )


def run(of: Session, knobs: Mapping[str, Any], **options: Any) -> tuple[list[float], list[float]]:
    if "devices" not in options:
        reports, evaluations = of.run(knobs, "cpu", loader(), steps=STEPS, **options)
    else:
        reports, evaluations = run_on_devices(of, knobs, "cpu", loader(), steps=STEPS, **options)
    return [each.loss for each in reports], evaluations


def test_the_users_own_model_comes_back_trained_as_on_one_device(tmp_path: Path) -> None:
    alone, model = made(), made()
    expected = run(session(alone), {}, evaluation=EvaluationPlan(loader()))
    parameters, log = dict(model.named_parameters()), tmp_path / "log"
    found = run(
        session(model, callbacks=(Logged(log),)),
        FSDP,
        devices=2,
        evaluation=EvaluationPlan(loader()),
    )
    assert found == (pytest.approx(expected[0], abs=LOSS), pytest.approx(expected[1], abs=LOSS))
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
    assert_trained_alike(dict(model.named_parameters()), dict(alone.named_parameters()), lr=LR)
    assert model.layers[0].weight is model.layers[2].weight
    assert model.seen == alone.seen
    processes, steps = zip(*(line.split() for line in log.read_text().splitlines()), strict=True)
    assert steps == tuple(map(str, range(1, STEPS + 1)))
    assert set(processes).isdisjoint({str(os.getpid())})
    assert len(set(processes)) == 1, "of the first rank"


def test_memory_that_runs_out_on_one_rank_sends_all_back_with_a_smaller_micro_batch(
    tmp_path: Path,
) -> None:
    """In the third step: two are kept."""
    most, notes = tmp_path / "most", list[str]()
    most.write_text("4")
    expected = run(session(made()), {})[0]
    narrow = session(
        made(most), tmp_path / "run", callbacks=(Narrowing(most),), listener=notes.append
    )
    losses, _ = run(narrow, FSDP | {"micro_batch_size": 4}, devices=2)
    assert losses == pytest.approx(expected, abs=LOSS)
    assert any(
        "memory ran out in the forward of step 3 on rank 1 of 2: all start again, with micro_b" in n
        for n in notes
    )
    assert "micro_batch_size: 2" in (tmp_path / "run" / "after-out-of-memory.yaml").read_text()


class Narrowing:
    """Leaves less memory after the second step."""

    def __init__(self, most: Path, to: int = 2) -> None:
        self.most = most
        self.to = to

    def __call__(self, report: StepReport) -> None:
        if report.step == 2:
            self.most.write_text(str(self.to))


def test_memory_that_never_suffices_is_told(tmp_path: Path) -> None:
    most = tmp_path / "most"
    most.write_text("4")
    own = session(made(most), callbacks=(Narrowing(most, to=0),))
    with pytest.raises(
        OutOfMemoryError, match="on rank 1 of 2, and nothing is left that would need less"
    ):
        run(own, FSDP | {"micro_batch_size": 1}, devices=2)


def test_weights_that_travel_have_no_name_that_stays_in_memory(tmp_path: Path) -> None:
    """Whichever process writes them, and whoever is killed meanwhile."""
    weights = {"weight": torch.arange(3.0)}
    with on_devices._nameless(tmp_path) as path:
        on_devices._write(weights, path)
        assert not list(tmp_path.iterdir())
        assert torch.equal(on_devices._mapped(path)["weight"], weights["weight"])
    assert not path.exists()


def test_a_memory_without_room_for_weights_is_told() -> None:
    with pytest.raises(
        InputError, match=r"given to other processes: OSError: .*No space left .*Make room"
    ):
        on_devices._write({"weight": torch.arange(3.0)}, Path("/dev/full"))


def test_weights_that_cannot_travel_are_told() -> None:
    model = made()
    own = session(model)
    model.layers[1].weight = nn.Parameter(torch.eye(8).to_sparse())
    with pytest.raises(
        InputError, match=r"layers\.1\.weight of the model is a Parameter, which cannot be given to"
    ):
        run(dataclasses.replace(own), FSDP, devices=2)
