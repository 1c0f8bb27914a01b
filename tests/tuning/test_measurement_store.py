"""The store: what is written is read back, by many processes at once, and no file it may find there breaks anything."""

import contextlib
import dataclasses
import multiprocessing
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.core.config import Config
from autofit.core.errors import StoreError
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.tuning import measurement_store
from autofit.tuning.measurement_store import Count, Store, Stored, Subject

SUBJECT, OTHER = Subject("key", "foo"), Subject("other", "bar")


def measurement(number: int = 0, **knobs: str | int | float | bool | None) -> Measurement:
    steps = StepSeconds(1.0, 0.9, 1.1)
    peak = PeakBytes(2**40, resident=5)
    return Measurement(
        Config(knobs), Outcome.FITS, number, steps, 8.0, None, peak, warnings=("odd",)
    )


def stored(number: int = 0, **about: str) -> Stored:
    return Stored(measurement(number), 2**33, **({"run": "here", "session": "one"} | about))


def held(path: Path, **changes: str) -> list[int]:
    return [
        each.measurement.number
        for each in Store(path).find(dataclasses.replace(SUBJECT, **changes))
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store.sqlite"


VALUES = st.text() | st.integers(-(2**62), 2**62) | st.floats(-1e9, 1e9) | st.booleans() | st.none()
MEASURED = st.builds(
    Measurement,
    config=st.dictionaries(st.text(), VALUES).map(Config),
    outcome=st.sampled_from(Outcome),
    number=st.integers(0, 2**62),
    step_seconds=st.none() | st.builds(StepSeconds, *[st.floats(1e-9, 1e9)] * 3),
    samples_per_second=st.none() | st.floats(1e-9, 1e9),
    peak_bytes=st.none()
    | st.builds(PeakBytes, st.integers(0, 2**62), st.none() | st.integers(0, 2**62)),
    reason=st.none() | st.text(),
    verified=st.booleans(),
    warnings=st.lists(st.text()).map(tuple),
)


@settings(max_examples=30)  # each waits for the disk several times
@given(
    st.lists(
        st.builds(Stored, MEASURED, st.integers(0, 2**62), run=st.text(), session=st.text()),
        max_size=4,
    )
)
def test_what_is_written_is_read_back(all_of_them: list[Stored]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Store(Path(folder) / "store.sqlite")
        for each in all_of_them:
            kept.add(SUBJECT, each)
        found = kept.find(SUBJECT)
    assert found == all_of_them
    kinds = [[type(value) for value in each.measurement.config.values()] for each in found]
    in_order = [dict(sorted(each.measurement.config.items())) for each in all_of_them]
    assert kinds == [[type(value) for value in each.values()] for each in in_order]


def test_by_default_it_lies_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Store().add(SUBJECT, stored())
    assert (tmp_path / "autofit" / "store" / "measurements.sqlite").exists()


def test_measurements_under_another_key_are_not_found(path: Path) -> None:
    Store(path).add(SUBJECT, stored())
    assert held(path, key="another") == []
    Store(path).add(dataclasses.replace(SUBJECT, key="another"), stored(7))
    assert (held(path), held(path, key="another")) == ([0], [7])


def test_before_anything_is_stored_there_is_no_file(path: Path) -> None:
    assert held(path) == []
    assert Store(path).count() == Store(path).clear() == Count(0, 0)
    assert not path.parent.exists()


def test_it_counts_and_forgets(path: Path) -> None:
    for number in range(3):
        Store(path).add(SUBJECT, stored(number))
    Store(path).add(dataclasses.replace(SUBJECT, key="torch 2"), stored())  # the same model
    Store(path).add(OTHER, stored())
    assert Store(path).count() == Store(path).clear() == Count(5, 2)
    assert Store(path).count() == Count(0, 0)
    assert held(path) == []
    Store(path).add(SUBJECT, stored(9))
    assert held(path) == [9]


def test_the_newest_of_each_subject_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_store, "MOST_OF_ONE", 3)
    for number in range(5):
        Store(path).add(SUBJECT, stored(number))
        Store(path).add(OTHER, stored(number + 10))
    assert (held(path), held(path, key="other")) == ([2, 3, 4], [12, 13, 14])


def test_the_newest_of_all_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement_store, "MOST", 3)
    for number in range(3):
        Store(path).add(OTHER, stored(number))
        Store(path).add(SUBJECT, stored(number))
    assert (held(path, key="other"), held(path)) == ([2], [1, 2])
    for number in range(3):
        Store(path).add(SUBJECT, stored(number))
    assert Store(path).count() == Count(3, 1)


def test_a_store_that_grew_large_shrinks_a_part_at_a_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        Store(path).add(SUBJECT, stored(number))
    monkeypatch.setattr(measurement_store, "MOST", 10)
    monkeypatch.setattr(measurement_store, "_AT_ONCE", 8)

    for left in (23, 16, 10, 10):
        Store(path).add(SUBJECT, stored(99))
        assert Store(path).count().measurements == left
    assert held(path)[-4:] == [99] * 4


def test_what_is_old_is_dropped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr(measurement_store.time, "time", lambda: now[0])
    Store(path).add(SUBJECT, stored(0))
    now[0] += measurement_store.DAYS * 86400 - 1
    Store(path).add(SUBJECT, stored(1))
    assert held(path) == [0, 1]
    now[0] += 2
    Store(path).add(SUBJECT, stored(2))
    assert held(path) == [1, 2]


def _add_many(path: str, subject: Subject, numbers: range) -> None:
    for number in numbers:
        Store(Path(path)).add(subject, stored(number))


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    parts = [range(start, start + 15) for start in (0, 15, 30)]
    processes = [
        context.Process(target=_add_many, args=(str(path), SUBJECT, part)) for part in parts
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    found = held(path)
    assert sorted(found) == list(range(45))
    assert [[each for each in found if each in part] for part in parts] == [
        list(part) for part in parts
    ]


def test_one_that_holds_on_for_too_long_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_store, "_WAIT_SECONDS", 0.05)
    Store(path).add(SUBJECT, stored())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="cannot be used: database is locked"):
        Store(path).add(SUBJECT, stored(1))
    assert held(path) == [0]  # readers need not wait
    other.close()
    Store(path).add(SUBJECT, stored(2))
    assert held(path) == [0, 2]


def _overwrite(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 1000)


def _overwrite_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000:-1000] = b"\x5a" * (len(content) - 2000)
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [_overwrite, _overwrite_the_middle, _cut])
@pytest.mark.parametrize(
    "use", [lambda store: store.find(SUBJECT), lambda store: store.add(SUBJECT, stored())]
)
def test_a_damaged_file_is_set_aside(
    path: Path, damage: Callable[[Path], None], use: Callable[[Store], Any]
) -> None:
    for number in range(50):
        Store(path).add(SUBJECT, stored(number))
    damage(path)
    damaged = path.read_bytes()
    with pytest.raises(
        StoreError,
        match=r"store\.sqlite is damaged \(.*\)\. It is set aside as store\.sqlite\.damaged; the",
    ):
        use(Store(path))
    assert (path.parent / "store.sqlite.damaged").read_bytes() == damaged
    assert held(path) == []
    Store(path).add(SUBJECT, stored(3))
    assert held(path) == [3]


def test_who_only_looks_leaves_a_damaged_file_where_it_is(path: Path) -> None:
    Store(path).add(SUBJECT, stored())
    _overwrite(path)
    damaged = path.read_bytes()
    with pytest.raises(
        StoreError, match=r"is damaged \(.*\)\. The next search sets it aside; autofit"
    ):
        Store(path).count()
    assert not Store(path).outdated()
    assert [each.read_bytes() for each in path.parent.iterdir()] == [damaged]


def test_clearing_removes_a_damaged_file_too(path: Path) -> None:
    Store(path).add(SUBJECT, stored())
    _overwrite(path)
    path.with_name("store.sqlite-journal").touch()
    assert Store(path).clear() is None
    assert list(path.parent.iterdir()) == []


def test_a_flipped_byte_is_read_around_or_told(path: Path) -> None:
    """Whatever SQLite makes of it: text that is no UTF-8, a missing table, a number where text was."""
    for number in range(5):
        Store(path).add(SUBJECT, stored(number))
    whole, told = path.read_bytes(), 0
    places = [*range(200), *range(200, 4096, 29), *range(4096, len(whole), 211)]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert set(held(path)) <= set(range(5))
        except StoreError:
            told += 1
    assert 0 < told < len(places)


def test_an_empty_file_is_an_empty_store(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert held(path) == []
    Store(path).add(SUBJECT, stored(3))
    assert held(path) == [3]


def _of_version(path: Path, version: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE measurements (other TEXT)")
        file.execute("INSERT INTO measurements VALUES ('kept')")
        file.execute(f"PRAGMA user_version = {version}")
    file.close()


# As autofit 0.1.0 wrote it before the keys of its caches became one.
SCHEMA_1 = """
CREATE TABLE subjects (
    id INTEGER PRIMARY KEY, device TEXT NOT NULL, versions TEXT NOT NULL, workload TEXT NOT NULL, model TEXT NOT NULL,
    UNIQUE (device, versions, workload)
);
CREATE TABLE measurements (
    id INTEGER PRIMARY KEY, subject INTEGER NOT NULL REFERENCES subjects, run TEXT NOT NULL, session TEXT NOT NULL,
    plan TEXT NOT NULL, cap_bytes INTEGER NOT NULL, config TEXT NOT NULL, measurement TEXT NOT NULL,
    measured_at REAL NOT NULL
);
CREATE INDEX of_subject ON measurements (subject, id);
INSERT INTO subjects VALUES (1, 'a CPU', 'torch 1', 'foo', 'mlp');
INSERT INTO measurements VALUES (1, 1, 'here', 'one', 'explored', 1, '{}', '{"number": 0, "outcome": "fits"}', 0.0);
PRAGMA user_version = 1;
"""


def test_one_of_an_older_autofit_is_begun_anew(path: Path) -> None:
    assert not Store(path).outdated()
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.executescript(SCHEMA_1)
    assert Store(path).outdated()
    assert held(path) == []
    assert Store(path).count() == Count(0, 0)
    Store(path).add(SUBJECT, stored(3))
    assert held(path) == [3]
    assert not Store(path).outdated()


def test_one_of_a_newer_autofit_is_left_alone(path: Path) -> None:
    _of_version(path, measurement_store.SCHEMA + 1)
    before = path.read_bytes()
    assert not Store(path).outdated()
    for use in (
        lambda: Store(path).find(SUBJECT),
        lambda: Store(path).add(SUBJECT, stored()),
        Store(path).count,
    ):
        with pytest.raises(StoreError, match="was written by a newer autofit"):
            use()
    assert path.read_bytes() == before
    assert Store(path).clear() is None
    assert held(path) == []


def test_a_measurement_of_another_form_is_passed_over(path: Path) -> None:
    for number in range(4):
        Store(path).add(SUBJECT, stored(number))
    with sqlite3.connect(path) as file:
        for number, text in ((1, "{"), (2, '{"outcome": "fits", "unheard_of": 1}'), (3, "[]")):
            file.execute("UPDATE measurements SET measurement = ? WHERE id = ?", (text, number + 1))
    file.close()
    assert held(path) == [0]


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = Store(tmp_path / "file" / "store.sqlite")
    assert blocked.find(SUBJECT) == []
    with pytest.raises(
        StoreError, match=r"cannot be written: File exists\. Check the directory, or search"
    ):
        blocked.add(SUBJECT, stored())
    (tmp_path / "folder.sqlite").mkdir()
    with pytest.raises(StoreError, match="cannot be used: unable to open database file"):
        Store(tmp_path / "folder.sqlite").find(SUBJECT)
