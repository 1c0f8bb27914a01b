"""A search whose run directory is deleted while it runs loses nothing, and one that measures nothing leaves nothing."""

import shutil
import tempfile
from collections.abc import Callable

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError, NoDeviceError, ProbeError
from autofit.core.events import Event
from autofit.core.measurement import Measurement
from autofit.core.record import Record
from autofit.core.result import SavedResult
from autofit.core.run_directory import RunDirectory
from tests.tuning.searching import Bench, by_micro_batch, notes_of

RATES = by_micro_batch({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0})


def at(
    probe: int, bench: Bench, action: Callable[[], object]
) -> Callable[[Config, bool], Measurement]:
    """Answers, before the one to this probe something happens."""

    def answer(config: Config, verifying: bool) -> Measurement:
        if len(bench.executor.asked) == probe:
            action()
        return RATES(config, verifying)

    return answer


@pytest.mark.parametrize("probe", [1, 3, 4, 7], ids=["first", "middle", "last", "verifying"])
def test_what_was_measured_is_written_again(bench: Bench, probe: int) -> None:
    run, events = bench.folder / "run", list[Event]()
    result = bench.search(at(probe, bench, lambda: shutil.rmtree(run)), listener=events.append)
    assert notes_of(events) == [
        f"{run} was deleted during the search: it is made again, with its journal."
    ]
    assert result.best
    assert SavedResult.load(run / "result.yaml").config == result.best.config
    assert [each.config for each in Record.load(run / "result.json").result.trials] == [
        t.config for t in result.trials
    ]
    resumed = bench.search(resume=True)
    assert resumed.trials == result.trials


def test_also_where_only_its_files_are_deleted(bench: Bench) -> None:
    run = bench.folder / "run"

    def delete() -> None:
        shutil.rmtree(run / "probes")
        (run / "journal.log").unlink()

    result = bench.search(at(3, bench, delete))
    assert len(result.trials) == 4
    assert bench.search(resume=True).trials == result.trials


def test_what_another_search_has_there_now_is_left_to_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(bench.folder))
    run, other = bench.folder / "run", RunDirectory(bench.folder / "run")

    def replace() -> None:
        shutil.rmtree(run)
        other.__enter__()

    with pytest.raises(
        InputError,
        match=r"run was deleted during the search and cannot be made again: .* is in use",
    ):
        bench.search(at(3, bench, replace))
    assert {each.name for each in run.iterdir()} == {".lock", "probes"}
    other.__exit__(None, None, None)
    (elsewhere,) = bench.folder.glob("autofit-*")
    probed = len(bench.executor.explored)
    assert len(bench.search(RATES, out=elsewhere, resume=True).trials) == 4
    assert len(bench.executor.explored) == probed + 1


@pytest.mark.parametrize("there", [None, "autofit-runs"])
@pytest.mark.parametrize("fault", ["look", "refused", "probe", "interrupt"])
def test_a_search_that_fails_before_a_measurement_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fault: str, there: str | None
) -> None:
    here = bench.folder / "here"
    here.mkdir()
    if there:
        (here / there).mkdir()
    monkeypatch.chdir(here)
    errors = {
        "look": NoDeviceError,
        "refused": InputError,
        "probe": ProbeError,
        "interrupt": KeyboardInterrupt,
    }

    def fail(*_: object, **__: object) -> None:
        raise errors[fault]("it fails")

    if fault != "refused":
        monkeypatch.setattr(bench.executor, "measure" if fault == "probe" else "inspect", fail)
    with pytest.raises(errors[fault]):
        bench.search(out=None, set={"precision": "tf32" if fault == "refused" else "fp32"})
    assert [each.name for each in here.rglob("*")] == ([there] if there else [])
