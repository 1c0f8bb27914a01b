"""What every test runs under: no network, tests of the GPU only where there is one, and one zygote for all probes."""

import atexit
import contextlib
import dataclasses
import functools
import gc
import getpass
import itertools
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_CACHES = itertools.count()
# Half a minute each: one process would be busy with them when the others have ended.
_LONGEST = {
    "test_examples.py",
    "test_layouts.py",
    "test_losses_of_whole_batches.py",
    "test_main.py",
    "test_on_ray.py",
    "test_pairs.py",
    "test_quarter_hour.py",
    "test_readme.py",
    "test_session_of_ranks.py",
    "test_several_ranks.py",
    "test_tensor_and_context_ranks.py",
    "test_whole_space.py",
}

# The same examples on every run, and no judgement on the speed of the machine.
settings.register_profile(
    "autofit", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("autofit")

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers

# Containers often forbid to keep bytecode; then each of some hundred processes would compile autofit again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Before anything imports torch: each worker has its share of the cores, and idle threads must not spin beside others.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
_SHARE = len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _SHARE)))

# Before anything imports torch: Inductor's cache takes what was compiled for other vectors for its own, which then does
# not compile, or computes something else.
_VECTORS = os.environ.get("ATEN_CPU_CAPABILITY")
if _VECTORS:
    _OWN = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{_VECTORS}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_OWN))

# Before anything imports datasets: what tests tokenise is not kept among the user's data sets.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="autofit-tests-")
atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a cache of autofit's. It is empty but for what takes seconds and comes out the same each time: how fast the
    machine is, and what is predicted of whole spaces."""
    own = tmp_path_factory.getbasetemp()
    of_all_workers = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def make() -> Path:
        cache = own / f"cache-{next(_CACHES)}"
        (cache / "autofit").mkdir(parents=True)
        for kind in ("rates", "estimates"):
            shared = of_all_workers / kind
            shared.mkdir(exist_ok=True)
            (cache / "autofit" / kind).symlink_to(shared)
        return cache

    return make


@pytest.fixture(autouse=True)
def own_cache(new_cache: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one, or the user, has stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(new_cache()))


@pytest.fixture(autouse=True)
def no_leak_is_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No training of a test is told of a leak, but those of the watch's own tests."""
    watch = sys.modules.get("autofit.training.memory_watch")
    if watch and request.path.name != "test_memory_watch.py":
        monkeypatch.setattr(watch.MemoryWatch, "_warn_of_leak", lambda _, what: pytest.fail(what))


@pytest.fixture(autouse=True)
def ctrl_c_is_kept() -> Iterator[None]:
    """No test leaves Ctrl-C ignored, or handled by something of its own: later ones interrupt themselves."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before, f"the test left another handler of SIGINT: {after}"


@pytest.fixture(autouse=True, scope="session")
def brief_probes() -> Iterator[None]:
    """Searches in this process time few steps: what fits and what is told of it is tested, not how fast anything is."""
    from autofit.tuning import forecast, measured

    with pytest.MonkeyPatch.context() as patch:
        for name in ("EXPLORE_PLAN", "VERIFY_PLAN", "FAST_EXPLORE_PLAN", "FAST_PLAN"):
            patch.setattr(
                measured, name, dataclasses.replace(getattr(measured, name), max_seconds=0.05)
            )
        patch.setattr(
            forecast, "predict_all", functools.partial(forecast.predict_all, measuring=0.1)
        )
        yield


@pytest.fixture(autouse=True)
def known_proofs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a loss of transformers averages over is proven once, but where tests are of proofs."""
    folder = request.path.parent.name
    if folder not in ("api", "cli", "examples") or "equal_work" in request.path.name:
        yield
        return

    from tests import proofs

    with proofs.remembered():
        yield


@pytest.fixture(autouse=True, scope="session")
def warm_ranks() -> Iterator[None]:
    """Processes that start ranks are warm: they would import torch for seconds each time."""
    from tests import warm

    with warm.started_by("autofit.distributed.launcher"):
        yield


@pytest.fixture(autouse=True, scope="session")
def warm_zygotes() -> Iterator[None]:
    """Zygotes are warm, too: predictions in this process start their own."""
    from tests import warm

    with warm.zygotes():
        yield


@pytest.fixture(scope="session")
def executor(
    tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[], Path]
) -> Iterator[Any]:
    """A LocalExecutor that all tests share."""
    from autofit.core.zygote_process import TRANSFORMERS, ZygoteProcess
    from autofit.probe import LocalExecutor
    from tests import warm

    # What functions of tests need beside autofit: each child would import it for a second.
    names = (*TRANSFORMERS, "pytest", "tests.api.fitting")
    if not warm.ON_A_CARD:
        warm.import_there(names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(new_cache()))
        patch.setattr(
            "autofit.probe.executors.local.ZygoteProcess",
            functools.partial(ZygoteProcess, names=names),
        )
        with warm.zygotes():
            shared = LocalExecutor(tmp_path_factory.mktemp("probes"), timeout=120)
    with shared:
        yield shared


@pytest.fixture
def shared_zygote(predicting_zygote: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches in this process use the shared zygote, and predict nothing before they measure: that takes seconds where
    their probes take tenths."""
    monkeypatch.setattr("autofit.tuning.measured.MeasuredSearch._predict", lambda *_: None)


@pytest.fixture
def predicting_zygote(executor: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Searches in this process use the shared zygote instead of starting their own, and follow no steps afterwards."""
    from tests.following import unfollowed

    unfollowed(monkeypatch)
    for room in ("tuning.measured", "api.doctor", "tuning.predicted"):
        monkeypatch.setattr(
            f"autofit.{room}.LocalExecutor", lambda *_: contextlib.nullcontext(executor)
        )
    yield
    executor.end_by(math.inf)  # the time limit of a search does not hold for other tests


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported to collect the tests lives to the end: Python does not go through it to find what may be freed.

    It would take seconds while it is imported, and later, with all tests collected, a second each time that Trainer,
    accelerate and what mends an out-of-memory ask for it. Compilers and traces make millions of objects: a tenth of
    their time was Python looking through them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # with what nobody needs any more: to find it takes a second in each process
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    """What a file's tests leave behind lives to the end, too: caches of compilers and traces, of millions of objects,
    take a second of each `gc.collect` in the files after it."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    """Before the first test, what warm processes are forked from is made."""
    from tests import warm

    if session.config.getoption("dist", "no") != "no":  # other processes run the tests
        return (yield)
    with warm.nursery():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without CUDA, and what is run by hand where nobody asks for it; put first
    what takes longest."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)
    for by_hand in ("tools", "cluster"):
        if by_hand not in config.option.markexpr:
            items[:] = [item for item in items if not item.get_closest_marker(by_hand)]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
