"""A config for another number of devices: predicted before any of them starts."""

from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from autofit.core.events import Event, Note
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.training.workload import training_workload
from autofit.tuning import changed_world
from tests import tiny
from tests.tuning.searching import CARD

WIDTH, BATCH, KIB = 32, 12, 1024
PAIR = {
    "data_parallel": "fsdp",
    "data_parallel_replicate": 1,
    "data_parallel_shard": 2,
    "micro_batch_size": 6,
    "gradient_accumulation_steps": 1,
}


class Here:
    """An executor that calls functions in this process."""

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...

    def detect(self, device: str | None) -> Hardware:
        return tiny.CPU

    def run(
        self,
        function: Callable[..., Any],
        workload: Workload,
        *arguments: Any,
        log: str,
        timeout: float,
    ) -> Any:
        return function(cloudpickle.loads(cloudpickle.dumps(workload)), *arguments)


class Wide(nn.Module):
    """Little weight, and much to keep of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def fitted(
    world: int,
    kib: float,
    monkeypatch: pytest.MonkeyPatch,
    knobs: Mapping[str, Any] = PAIR,
    **given: Any,
) -> tuple[int, int, list[str]]:
    """On how many devices, with which micro-batch, and the notes."""
    monkeypatch.setattr(changed_world, "LocalExecutor", Here)
    model, notes = Wide(), list[str]()
    before = {name: (id(each), each.clone()) for name, each in model.named_parameters()}
    workload = training_workload(model, [torch.randn(BATCH, 16, WIDTH)], given.get("loss", loss))

    def listener(event: Event) -> None:
        assert isinstance(event, Note)
        notes.append(event.text)

    options = search_options(**given.get("budget", {"device": "cpu", "mem": kib * KIB / GIB}))
    devices, found = changed_world.refit_to_devices(
        knobs, world, workload, model, options=options, listener=listener
    )
    for name, parameter in model.named_parameters():
        assert before[name][0] == id(parameter)
        assert torch.equal(parameter, before[name][1])
    return devices, found["micro_batch_size"], notes


@pytest.mark.parametrize(
    ("world", "kib", "micro", "words"),
    [
        (3, 10_000, 4, ""),
        (4, 10_000, 3, ""),
        (
            1,
            110,
            3,
            "on 1 device with micro-batches of 6 at least 0.00012 of 0.0001 GiB would be needed: it trains on 1",
        ),
        (3, 70, 2, "it trains on 3 devices with micro-batches of 2."),
        (4, 50, 1, "it trains on 4 devices with micro-batches of 1."),
        (4, 1, 3, "nothing smaller fits, so it trains as it is."),
    ],
)
def test_micro_batches_as_large_as_fit(
    world: int, kib: float, micro: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fitted(world, kib, monkeypatch)
    assert found[:2] == (world, micro)
    assert [words in note for note in found[2]] == [True] * bool(words)


def test_fewer_devices_where_what_they_exchange_needs_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's buffers, of about 200 MiB."""
    monkeypatch.setattr(Here, "detect", lambda *_: CARD)
    devices, micro, notes = fitted(4, 0, monkeypatch, budget={"gpu_mem": 0.65})
    assert (devices, micro) == (1, 6)
    assert notes[0].endswith("GiB would be needed: it trains on 1 device with micro-batches of 6.")


def test_what_cannot_be_predicted_trains_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def asking(model: Any, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        return value if value.item() else value * 2

    (note,) = fitted(4, 50, monkeypatch, loss=asking)[2]
    assert note.startswith(
        "whether this config fits 4 devices could not be predicted: the model's forward reads a"
    )


@pytest.mark.parametrize(
    ("knobs", "world", "is_another"),
    [
        (PAIR, 2, False),
        (PAIR, 4, True),
        ({"data_parallel": "fsdp"}, 4, False),
        ({"data_parallel_shard": None}, 2, True),
    ],
)
def test_a_config_that_names_no_degrees_is_for_any_world(
    knobs: dict[str, Any], world: int, is_another: bool
) -> None:
    assert changed_world.is_of_another_world(knobs, world) is is_another
