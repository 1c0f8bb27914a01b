"""Which devices `fit` trains on: its own processes, those that a launcher started, or this one."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.layout import fitted_to
from autofit.core.options import SearchOptions
from autofit.training.session import Session

BATCHES = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(2)]
FSDP = {"data_parallel": "fsdp"}


def loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def fitted(**given: Any) -> autofit.Trained:
    return autofit.fit(nn.Linear(4, 4), BATCHES, loss=loss, lr=1e-2, device="cpu", **given)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """The numbers of processes that would have been started, and the configs."""
    found: list[tuple[int, dict[str, Any]]] = []

    def run(
        _: Session, config: Any, *__: Any, devices: int, **___: Any
    ) -> tuple[list[Any], list[float]]:
        found.append((devices, dict(config)))
        return [], []

    def predicted(
        config: Any, world: int, workload: Any, *_: Any, **__: Any
    ) -> tuple[int, dict[str, Any]]:
        return world, fitted_to(config, world, workload.effective_batch_size)

    monkeypatch.setattr("autofit.api.fit.run_on_devices", run)
    monkeypatch.setattr("autofit.api.fit.refit_to_devices", predicted)
    return found


def test_as_many_as_asked_for_or_as_the_config_is_for(launched: list[Any]) -> None:
    fitted(config=FSDP, devices=4)
    whole = FSDP | {"data_parallel_replicate": 1, "data_parallel_shard": 2, "micro_batch_size": 4}
    fitted(config=whole)
    fitted(config=whole, devices=8)
    assert launched == [
        (4, FSDP),
        (2, whole),
        (8, FSDP | {"data_parallel_replicate": 1, "micro_batch_size": 1}),
    ]


@pytest.mark.parametrize("restart", [None, lambda: None])
def test_a_process_that_ends_after_training_does_not_put_the_model_together(
    restart: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    monkeypatch.setattr(
        Session, "run", lambda session, *_, **__: sessions.append(session) or ([], [])
    )
    monkeypatch.setattr("autofit.api.fit.joined", lambda *_: contextlib.nullcontext())
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    fitted(config=FSDP, restart=restart)
    assert (sessions[0].taken is None) is (restart is None)


def test_one_device_needs_no_process_of_its_own(launched: list[Any]) -> None:
    assert len(fitted(config=FSDP | {"data_parallel_shard": 2}, devices=1).history) == 2
    assert not launched


def test_devices_that_the_batch_does_not_go_round_are_left_idle(
    launched: list[Any], caplog: Any
) -> None:
    fitted(config=FSDP, devices=3)
    assert launched == [(2, FSDP)]
    assert "8 samples do not divide among 3 devices: 2 of them train." in caplog.text


def test_without_a_config_a_search_is_for_as_many(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def result(_: Session, options: SearchOptions, *__: Any, **___: Any) -> Any:
        asked.append(options.devices)
        return Config(FSDP | {"data_parallel_shard": options.devices}), "cpu", None

    monkeypatch.setattr("autofit.api.fit._searched", result)
    fitted(devices=2)
    fitted(devices=3)  # of which two train
    assert asked == [2, 2]
    assert launched == [(2, FSDP | {"data_parallel_shard": 2})] * 2


def test_a_search_starts_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"this one was started as one of several\. Give config="):
        fitted()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"devices": 0}, "devices must be a whole number from 1 to 1024, not 0"),
        ({"devices": True}, "devices must be a whole number from 1 to 1024, not True"),
        (
            {"nodes": 2},
            r"2 nodes are to train together, and this process was started alone\. Start it on each: torchrun",
        ),
    ],
)
def test_what_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fitted(**{"config": FSDP, **given})
