"""What an evaluation takes is said before a training starts."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autofit import fit
from autofit.core.budget import Budget
from autofit.core.events import Event, Note
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.options import search_options
from autofit.estimate.estimator import predict
from autofit.tuning import between_steps
from tests.estimate.traced import AMPERE
from tests.tiny import CPU, MLP, classify, mlp_workload

BATCH = mlp_workload().batch(4)


class Thorough(MLP):
    """A model that computes far more in an evaluation than in a step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            torch.zeros(8 * MIB // 4)
        return super().forward(*args, **kwargs)


def notes_of(model: nn.Module, **options: Any) -> list[str]:
    notes = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    fit(model, [BATCH], loss=classify, config={}, lr=1e-3, listener=listen, device="cpu", **options)
    return [note for note in notes if "predicted to take" in note]


def test_an_evaluation_that_takes_more_than_the_budget_is_said_before_training() -> None:
    (note,) = notes_of(Thorough(), eval_loader=[BATCH], mem=4 * MIB / GIB)
    assert note == ("an evaluation is predicted to take 0.008 GiB, and 0.004 GiB may be used.")


def test_nothing_is_said_of_what_fits_or_does_not_happen() -> None:
    assert notes_of(Thorough(), eval_loader=[BATCH], mem=1) == []
    assert notes_of(Thorough(), mem=4 * MIB / GIB) == []


def notes_on_two(device: str, **budget: float) -> list[str]:
    notes = between_steps.notes_between_steps(
        {"data_parallel": "fsdp"},
        mlp_workload(),
        MLP(),
        options=search_options(**budget),
        device=device,
        world=2,
        is_evaluated=False,
        is_saved=True,
        starts_ranks=True,
    )
    return [note.partition(" GiB")[0] for note in notes]


def test_what_the_first_of_several_ranks_gathers_to_save_is_said() -> None:
    assert notes_on_two("cpu", mem=400 / 2**20) == []
    assert notes_on_two("cpu", mem=320 / 2**20) == ["saving is predicted to take 0.00035"]


def test_cards_of_ranks_that_are_yet_to_start_are_not_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Child(nullcontext[Any]):
        """Runs in this process what belongs in a child."""

        def __enter__(self) -> Any:
            return self

        def detect(self, device: str) -> Hardware:
            return AMPERE

        def run(self, function: Any, *arguments: Any, **_: Any) -> Any:
            return function(*arguments)

    monkeypatch.setattr(between_steps, "LocalExecutor", Child)
    monkeypatch.delattr(between_steps, "detect")
    assert notes_on_two("cuda", gpu_mem=4) == []
    (note,) = notes_on_two("cuda", gpu_mem=0.1)
    assert note.startswith("saving is predicted to take 0.7")  # mostly the context


def test_what_cannot_be_predicted_trains_all_the_same() -> None:
    class Curious(MLP):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if next(self.parameters()).sum().item() == 1e9:
                raise AssertionError
            return super().forward(*args, **kwargs)

    assert notes_of(Curious(), eval_loader=[BATCH], mem=4 * MIB / GIB) == []


def test_what_an_evaluation_takes_counts_as_what_a_config_needs() -> None:
    plain = predict(mlp_workload(), {}, CPU)
    thorough = predict(dataclasses.replace(mlp_workload(), model=Thorough), {}, CPU)
    assert plain.evaluation_bytes is not None
    assert plain.evaluation_bytes < plain.allocated_bytes
    assert thorough.evaluation_bytes == pytest.approx(plain.evaluation_bytes + 8 * MIB, abs=8192)
    assert thorough.allocated_bytes == plain.allocated_bytes
    assert plain.high < 8 * MIB < thorough.low
    assert thorough.fits(Budget(8 * MIB, GIB)) == "no"
    assert not any("than a step" in note for note in plain.notes)
    assert "evaluation takes more memory than a step: 0.01 GiB of tensors." in thorough.notes
