"""Stored results: found for the same search, never for another."""

import contextlib
import shutil
import sqlite3
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

from autofit.core.config import Config
from autofit.core.files import cache_file, read_cache, write_cache
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import search_options
from autofit.core.record import Record
from autofit.core.workload import Workload
from autofit.training.fingerprint import LAYOUT
from autofit.training.workload import workload_from
from autofit.tuning import result_cache
from autofit.tuning.measurement_store import Store, Stored, Subject
from autofit.tuning.warm_start import WarmStart
from tests import tiny
from tests.core.test_record import RESULT
from tests.processes import as_ordinary_user

OPTIONS = search_options(mem=1, space="full", trials=3)


def batches(features: int = 48, samples: int = 8) -> list[Any]:
    return [(torch.randn(samples, features), torch.zeros(samples, dtype=torch.int64))]


def key(
    model: nn.Module | None = None, loader: Any = None, loss: Any = tiny.classify, **more: Any
) -> str:
    return result_cache.key_of(
        workload_from(model or tiny.MLP(), loader or batches(), loss, **more), OPTIONS
    )


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
    assert (
        len({key(loss=each) for each in (partial(loss, 2), partial(loss, 3), partial(other, 2))})
        == 3
    )


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
    name = __name__ if __name__.startswith("tests.") else f"tests.tuning.{Path(__file__).stem}"
    code = f"import importlib; it = importlib.import_module({name!r}); print(it.key(loss=it.scaled(2)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == key(loss=scaled(2))


def cached(folder: Path, name: str = "x") -> Path:
    """Cache a search under a name; its run directory."""
    run = folder / "runs" / "x"
    run.mkdir(parents=True)
    (run / "journal.log").write_text("what was measured\n")
    result = replace(RESULT, run_directory=str(run))
    (run / "result.json").write_text(Record(result).to_text())
    result_cache.save(name, result)
    return run


def test_what_cannot_be_read_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert result_cache.find("x") is None
    cached(tmp_path)
    path = tmp_path / "autofit" / "results" / "x.json"
    text = path.read_text()
    for wrong in (
        "half: [",
        text.replace("12.5", "13.5"),
        Record(replace(RESULT, best=None, tiers={})).to_text(),
    ):
        assert wrong != text
        path.write_text(wrong)
        assert result_cache.find("x") is None
    path.write_text(text)
    assert result_cache.find("x") is not None
    path.with_suffix(".log").unlink()
    assert result_cache.find("x") is None


def test_a_cached_result_names_files_only_while_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = cached(tmp_path)
    found = result_cache.find("x")
    assert found is not None
    assert found.result() == replace(RESULT, run_directory=str(run))
    shutil.rmtree(run)
    assert found.result() == replace(RESULT, run_directory=None, files={})


def test_a_run_directory_is_written_again_and_another_search_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached(tmp_path)
    found = result_cache.find("x")
    assert found is not None
    workload = workload_from(tiny.MLP(), batches(), tiny.classify)
    for _ in range(2):  # the second time it is there already
        written = found.write(tmp_path / "out", workload, lambda text: None)
        assert written.run_directory == str(tmp_path / "out")
        assert {each.name for each in (tmp_path / "out").iterdir()} >= {
            "report.html",
            "result.yaml",
            "journal.log",
        }
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "journal.log").write_text("of another search\n")
    written = found.write(tmp_path / "taken", workload, lambda text: None)
    assert written.run_directory == str(tmp_path / "taken-2")
    assert [each.name for each in (tmp_path / "taken").iterdir()] == ["journal.log"]


def test_names_are_no_part_of_a_workload_that_is_the_same() -> None:
    workload = workload_from(tiny.MLP(), batches(), tiny.classify)
    assert isinstance(workload, Workload)
    assert result_cache.key_of(replace(workload, name="another"), OPTIONS) == result_cache.key_of(
        workload, OPTIONS
    )


OLD_RESULT = """{autofit: 1, model: mlp, workload: {}, hardware: {device: cpu, budget_gib: 1.0}, config: {},
measured: {samples_per_second: 1.0}}"""


def test_what_an_older_autofit_cached_is_not_used_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert result_cache.outdated_note() is None  # an empty cache
    cache_file("", "layout").unlink()
    # named by their digests alone
    old = {"results": f"{'0' * 32}.yaml", "estimates": f"{'1' * 32}.json"}
    for folder, name in old.items():
        cache_file(folder, name).parent.mkdir()
        cache_file(folder, name).write_text(OLD_RESULT if folder == "results" else "[[1.0], [2.0]]")
    path = Store().path
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.executescript("CREATE TABLE subjects (device TEXT); PRAGMA user_version = 1")
    note = result_cache.outdated_note()
    assert note == (
        "results of searches and predictions and measurements cached by an older autofit in "
        f"{path.parents[1]} are not used: they are made anew."
    )
    assert result_cache.outdated_note() is None
    cache_file("", "layout").write_bytes(b"\xff")
    assert result_cache.outdated_note() == note
    assert all(cache_file(folder, name).exists() for folder, name in old.items())


def test_what_this_autofit_cached_is_not_outdated(tmp_path: Path) -> None:
    cached(tmp_path / "elsewhere", key())
    Store().add(
        Subject("key", "foo"), Stored(Measurement(Config(), Outcome.FITS), 1, "here", "one")
    )
    assert result_cache.find(key())
    assert result_cache.outdated_note() is None


def test_a_key_has_a_layout() -> None:
    assert key().startswith(f"v{LAYOUT}-")


@pytest.mark.parametrize("kind", ["unreadable", "read only", "a file", "a home of somebody else's"])
def test_a_cache_is_optional_everywhere(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As in a container with another user, whose home is not theirs."""

    def everything(folder: Path) -> None:
        place = folder / "home"
        if kind == "a file":
            place.touch()
        else:
            (place / ".cache" / "autofit").mkdir(parents=True)
            closed = place / ".cache" / "autofit" if kind == "read only" else place
            closed.chmod(0o500 if kind == "read only" else 0o000)
        if kind == "a home of somebody else's":
            monkeypatch.delenv("XDG_CACHE_HOME")
            monkeypatch.setenv("HOME", str(place))
        else:
            monkeypatch.setenv(
                "XDG_CACHE_HOME", str(place / ".cache" if kind == "read only" else place)
            )

        assert result_cache.outdated_note() is None
        assert result_cache.find("key") is None
        write_cache(cache_file("rates", "a.json"), {"a": 1})
        assert read_cache(cache_file("rates", "a.json"), Any) is None
        assert not Store().outdated()
        told: list[str] = []
        subject = Subject("key", "foo")
        known = WarmStart(
            subject, GIB, exact=True, run=folder, notify=told.append, hardware=tiny.CPU
        )
        assert known.prior_measurements(resumed=False) == ()
        known.add(Measurement(Config(micro_batch_size=1), Outcome.FAILED))
        assert all("goes on without earlier measurements" in text for text in told)
        place.chmod(0o700)

    as_ordinary_user(everything)
