"""What every test runs under: no network, tests of the GPU only where there is one, and one zygote for all probes."""

import atexit
import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_TESTS = itertools.count()

# The same examples on every run, and no judgement on the speed of the machine.
settings.register_profile("autofit", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("autofit")

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before anything imports torch: its idle threads must not spin beside others

# Before anything imports datasets: what tests tokenise is not kept among the user's data sets.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="autofit-tests-")
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one, or the user, has stored, but for how fast the machine is: that takes 2 s."""
    cache = tmp_path_factory.getbasetemp() / f"cache-{next(_TESTS)}"
    rates = tmp_path_factory.getbasetemp() / "rates"
    rates.mkdir(exist_ok=True)
    (cache / "autofit").mkdir(parents=True)
    (cache / "autofit" / "rates").symlink_to(rates)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(autouse=True, scope="session")
def brief_probes() -> Iterator[None]:
    """Searches in this process time few steps: what fits and what is told of it is tested, not how fast anything is."""
    from autofit.tuning import run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("EXPLORE_PLAN", "VERIFY_PLAN"):
            patch.setattr(run, name, dataclasses.replace(getattr(run, name), max_seconds=0.3))
        patch.setattr(run, "predict_all", functools.partial(run.predict_all, measuring=0.3))
        yield


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A LocalExecutor that all tests share: its zygote takes seconds to start."""
    from autofit.probe import LocalExecutor

    with LocalExecutor(tmp_path_factory.mktemp("probes"), timeout=120) as shared:
        yield shared


@pytest.fixture
def shared_zygote(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches in this process use the shared zygote instead of starting their own."""
    for room in ("tuning.run", "api.doctor", "tuning.predicted"):
        monkeypatch.setattr(f"autofit.{room}.LocalExecutor", lambda *_: contextlib.nullcontext(executor))


def pytest_collection_finish() -> None:
    """What is imported by now lives to the end: Python no longer goes through it to find what may be freed.

    With all tests collected that takes a second, and Trainer, accelerate and what mends an out-of-memory ask for it.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without CUDA, and leave out `tools` where nobody asks for it."""
    if "tools" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("tools")]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
