"""Fingerprints: the same for what takes the same memory and time, another for whatever may change either."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.workload import Workload
from autofit.models import resolve
from autofit.models.fake_quantised import FakeQuantisation
from autofit.training.fingerprint import Code
from autofit.training.fingerprint import fingerprint as of_model
from autofit.training.meta_model import meta_model_from
from tests import tiny

SOURCE = """
import torch
from torch import nn
from autofit import Workload
import beside

SCALE = {scale}

def mixed(x):
    return {mixed}

class Mixer(nn.Module):
    depth = {depth}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.after = {after}

    @staticmethod
    def squeezed(x):
        return {squeezed}

    @property
    def both(self):
        return {both}

    def forward(self, x):
        return beside.halved(self.squeezed(mixed(self.after(self.linear(x))))) * SCALE

def workload():
    return Workload(model=Mixer, batch=lambda n: (torch.ones(n, 8), torch.zeros(n)), loss=lambda m, b: m(b[0]).mean())
"""
PLAIN = {
    "scale": "1",
    "mixed": "x",
    "depth": "2",
    "after": "torch.relu",
    "squeezed": "x",
    "both": "None",
}


InFile = Callable[..., str]


def fingerprint(workload: Workload) -> str:
    return of_model(workload, meta_model_from(workload.model))


@pytest.fixture
def in_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InFile:
    """The fingerprint of a workload whose code stands in a file, with a module beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    # two versions may be written within a clock's tick
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def told(halved: str = "x / 2", remark: str = "", **changes: str) -> str:
        (tmp_path / "mine.py").write_text(remark + SOURCE.format(**(PLAIN | changes)))
        (tmp_path / "beside.py").write_text(f"def halved(x):\n    return {halved}\n")
        sys.modules.pop("beside", None)
        return fingerprint(resolve(f"{tmp_path / 'mine.py'}:workload"))

    return told


def test_code_of_ones_own_matters_wherever_it_stands(in_file: InFile) -> None:
    changes: list[dict[str, str]] = [
        {},
        {"halved": "x + x"},
        {"scale": "2"},
        {"mixed": "x * x"},
        {"depth": "3"},
    ]
    changes += [{"after": "lambda x: x"}, {"squeezed": "x.relu()"}, {"both": "self.depth"}]
    told = [in_file(**each) for each in changes]
    assert len(set(told)) == len(told)


def test_remarks_and_lines_do_not_matter(in_file: InFile) -> None:
    assert in_file() == in_file(remark="# a remark\n\n")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"sliding_window": 8},
        {"effective_batch_size": 8},
        {"sequence_length": 8},
    ],
    ids=str,
)
def test_a_model_with_a_config_is_told_by_it(change: dict[str, Any]) -> None:
    assert fingerprint(tiny.llama_workload()) == fingerprint(tiny.llama_workload()) != ""
    assert fingerprint(tiny.llama_workload(**change)) != fingerprint(tiny.llama_workload())


@pytest.mark.parametrize(
    "change",
    [
        {"parts": ("lm_head",)},
        {"asks_inputs": True},
        {"rounds": FakeQuantisation(group_size=16, of_inputs=False)},
    ],
)
def test_what_is_trained_of_a_model_and_how_it_rounds_matter(change: dict[str, Any]) -> None:
    workload = tiny.llama_workload()
    other = dataclasses.replace(workload, model=dataclasses.replace(workload.model, **change))
    assert fingerprint(other) != fingerprint(workload)


def test_what_a_model_is_called_and_where_its_config_came_from_does_not_matter() -> None:
    preset = resolve("tiny-llama")
    renamed = dataclasses.replace(preset.model, name="another", source={})
    assert fingerprint(
        dataclasses.replace(preset, model=renamed, name="another", source={})
    ) == fingerprint(preset)
    moved = dataclasses.replace(
        preset.model, config={**preset.model.config, "_name_or_path": "/somewhere/else"}
    )
    assert fingerprint(dataclasses.replace(preset, model=moved)) == fingerprint(preset)
    own_code = dataclasses.replace(preset.model, trust_remote_code=True)
    assert fingerprint(dataclasses.replace(preset, model=own_code)) != fingerprint(preset)


def test_threads_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(tiny.mlp_workload())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert fingerprint(tiny.mlp_workload()) != before


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.factor * tiny.classify(model, batch)

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.loss(model, batch)


@pytest.mark.parametrize(
    "made", [lambda factor: Scaled(factor).loss, Scaled], ids=["method", "object"]
)
def test_what_a_loss_holds_matters(made: Callable[[float], Any]) -> None:
    def told(factor: float) -> str:
        return fingerprint(dataclasses.replace(tiny.mlp_workload(), loss=made(factor)))

    assert told(2.0) == told(2.0) != told(3.0)


def test_code_that_calls_itself_is_told() -> None:
    def down(n: int) -> int:
        return n and up(n - 1)

    def up(n: int) -> int:
        return n and down(n - 1)

    assert Code().of(down) == Code().of(down) != Code().of(up)


def test_code_of_libraries_is_left_to_their_versions() -> None:
    assert len(str(Code().of(nn.functional.scaled_dot_product_attention))) < 1_000
    assert len(str(Code().of(nn.MultiheadAttention))) < 100_000


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 10)
        self.endless: list[Any] = []
        self.endless.append(self.endless)


def test_what_cannot_be_told_is_an_error() -> None:
    with pytest.raises(RecursionError):
        fingerprint(Workload(model=Odd, batch=tiny.mlp_workload().batch))


def _packed(patches: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(samples: int) -> dict[str, torch.Tensor]:
        grid = torch.tensor([[1, 1, patches]] * samples)
        pixels, ids = torch.ones(samples * patches, 8), torch.full((samples, patches), 5)
        return {"input_ids": ids[:, :4], "pixel_values": pixels, "image_grid_thw": grid}

    return batch


def test_the_rows_of_packed_samples_and_what_splits_them_make_a_difference() -> None:
    few, many = (
        dataclasses.replace(tiny.mlp_workload(), batch=_packed(patches)) for patches in (4, 8)
    )
    assert (
        fingerprint(few)
        == fingerprint(dataclasses.replace(few, batch=_packed(4)))
        != fingerprint(many)
    )
    assert fingerprint(few) != fingerprint(
        dataclasses.replace(few, split=lambda batch, size: [batch])
    )
