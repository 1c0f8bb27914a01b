"""Stored results: found for the same search, never for another."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.training.workload import workload_from
from autofit.tuning import result_cache
from tests import tiny

OPTIONS = search_options(mem=1, space="full", trials=3)


def batches(features: int = 48, samples: int = 8) -> list[Any]:
    return [(torch.randn(samples, features), torch.zeros(samples, dtype=torch.int64))]


def key(model: nn.Module | None = None, loader: Any = None, loss: Any = tiny.classify, **more: Any) -> str:
    return result_cache.key_of(workload_from(model or tiny.MLP(), loader or batches(), loss, **more), OPTIONS)


def frozen() -> nn.Module:
    model = tiny.MLP()
    next(model.parameters()).requires_grad_(False)
    return model


def in_bf16() -> nn.Module:
    return tiny.MLP().bfloat16()


class Deeper(tiny.MLP):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) * 2


def scaled(factor: float) -> Callable[[nn.Module, Any], torch.Tensor]:
    return lambda model, batch: factor * tiny.classify(model, batch)


def test_weights_and_the_values_of_data_do_not_matter() -> None:
    assert key() == key(tiny.MLP(), batches())
    assert key(loss=scaled(2)) == key(loss=scaled(2))


@pytest.mark.parametrize(
    "other",
    [
        lambda: key(frozen()),
        lambda: key(in_bf16()),
        lambda: key(Deeper()),
        lambda: key(nn.Sequential(nn.Linear(48, 10))),
        lambda: key(loader=batches(samples=16)),
        lambda: key(loss=scaled(2)),
        lambda: key(optimizer=torch.optim.NAdam),
    ],
)
def test_what_changes_the_search_changes_the_key(other: Callable[[], str]) -> None:
    assert other() != key()


class Repeated(nn.Linear):
    """The same weights, used so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(48, 48)
        self.times = times


def test_a_setting_that_no_shape_shows_matters() -> None:
    assert key(Repeated(1)) == key(Repeated(1)) != key(Repeated(50))
    windows = [tiny.llama(sliding_window=window)() for window in (8, 64)]
    assert key(windows[0]) != key(windows[1])


def test_the_code_of_what_a_class_inherits_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Deeper())
    monkeypatch.setattr(tiny.MLP, "forward", lambda self, features: self.out(features))
    assert key(Deeper()) != before


def test_what_a_partial_function_holds_matters() -> None:
    def loss(factor: float, model: nn.Module, batch: Any) -> torch.Tensor:
        return factor * tiny.classify(model, batch)

    def other(factor: float, model: nn.Module, batch: Any) -> torch.Tensor:
        return tiny.classify(model, batch) / factor

    assert key(loss=partial(loss, 2)) == key(loss=partial(loss, 2))
    assert len({key(loss=each) for each in (partial(loss, 2), partial(loss, 3), partial(other, 2))}) == 3


def test_what_a_function_closes_over_matters() -> None:
    assert key(loss=scaled(2)) != key(loss=scaled(3))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"mem": 2.0}, False),
        ({"space": "lora"}, False),
        ({"trials": 4}, False),
        ({"set": {"precision": ("fp32",)}}, False),
        ({"out": Path("elsewhere")}, True),
        ({"probe_timeout": 5.0}, True),
        ({"store": False}, True),
    ],
    ids=str,
)
def test_options(change: dict[str, Any], same: bool) -> None:
    workload = workload_from(tiny.MLP(), batches(), tiny.classify)
    other = OPTIONS.model_copy(update=change)
    assert (result_cache.key_of(workload, other) == result_cache.key_of(workload, OPTIONS)) is same


def test_a_space_of_ones_own_is_known_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("precision: [fp32]\n")
    workload, options = tiny.mlp_workload(), search_options(mem=1, space=str(path))
    before = result_cache.key_of(workload, options)
    path.write_text("precision: [bf16]\n")
    assert result_cache.key_of(workload, options) != before


def test_versions_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(result_cache, "versions", lambda: {"torch": "9.9"})
    assert key() != before


def test_another_process_finds_the_same() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', '.']; import test_stored;"
        "print(test_stored.key(loss=test_stored.scaled(2)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == key(loss=scaled(2))


def test_what_cannot_be_read_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert result_cache.find("x") is None
    path = tmp_path / "autofit" / "results" / "x.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("half: [")
    assert result_cache.find("x") is None


def test_names_are_no_part_of_a_workload_that_is_the_same() -> None:
    workload = workload_from(tiny.MLP(), batches(), tiny.classify)
    assert isinstance(workload, Workload)
    assert result_cache.key_of(replace(workload, name="another"), OPTIONS) == result_cache.key_of(workload, OPTIONS)
