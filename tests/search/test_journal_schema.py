"""Journals whose checksums are right and whose records are not: any part of any record of another type."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autofit.core.errors import InputError
from autofit.search.finals import Finals
from autofit.search.journal import Journal, begun_with, open_study
from autofit.search.sampler import measurements_of
from autofit.search.study import Limits, search

SAMPLER = optuna.samplers.RandomSampler(seed=0)
EXPLORED = "explored"
OTHERS: tuple[Any, ...] = (None, "text", -1, 2**70, 1.5, True, [], {}, [1, [2]], {"a": None})


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each part of some data, from the outermost in."""
    yield path
    parts: Any = data.items() if isinstance(data, dict) else ()
    if isinstance(data, list):
        parts = enumerate(data)
    for key, part in parts:
        yield from paths_in(part, (*path, key))


def with_other(data: Any, path: tuple[Any, ...], other: Any) -> Any:
    """The data with another value in one place."""
    if not path:
        return other
    key, *rest = path
    changed = dict(data) if isinstance(data, dict) else list(data)
    changed[key] = with_other(data[key], tuple(rest), other)
    return changed


def signed(record: dict[str, Any]) -> str:
    """The line of a record, with the checksum of what it holds."""
    text = json.dumps(record, separators=(",", ":"))[:-1]
    return f'{text},"crc":"{zlib.crc32(text.encode()):08x}"}}'


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def test_a_part_of_another_type_costs_its_record_and_no_more(tmp_path: Path, formula: Any) -> None:
    problem = formula()
    path = tmp_path / "journal.log"
    journal = Journal(path, {"model": "m"}, budget_bytes=1)
    search(problem.space, problem.problem(), limits=Limits(trials=3), journal=journal)
    lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    asked = next(
        record["user_attr"][EXPLORED]["asked"]
        for record in records
        if EXPLORED in record.get("user_attr", ())
    )

    seen: set[tuple[Any, ...]] = set()
    wrong = {}
    for number, record in enumerate(records):
        del record["crc"]
        for place in paths_in(record):
            kind = (record["op_code"], *sorted(record), *place)
            if kind in seen or not place:
                continue
            seen.add(kind)
            for other in OTHERS:
                if type(other) is type(at(record, place)):
                    continue
                changed = signed(with_other(record, place, other))
                text = [*lines[:number], changed, *lines[number + 1 :]]
                path.write_text("\n".join(text) + "\n")
                try:
                    begun_with(path)
                    study = open_study(Journal(path, {"model": "m"}, budget_bytes=1), SAMPLER)
                    Finals(study, asked, measurements_of(study))
                except InputError as error:
                    assert str(path) in error.message
                except Exception as error:
                    wrong[number, place, repr(other)] = repr(error)
                for rest in tmp_path.glob("*damaged*"):
                    rest.unlink()
    assert len(seen) > 50
    assert wrong == {}
