"""Hostile text in every leaf of a result.json: of the page, the pictures, Markdown and what a terminal shows, nothing
but words is other than with plain ones."""

import base64
import functools
import itertools
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from rich.console import RenderableType

from autofit.core.learning import LearningCurve
from autofit.core.record import Record
from autofit.report.comparison import compare
from autofit.report.explain import explain, nothing_fits_view
from autofit.report.html import pictures, report_page
from autofit.report.html.cells import result_html
from autofit.report.markdown import markdown
from autofit.report.table import result_table
from autofit.report.terminal import Terminal
from tests.hostile import EVERYTHING, TEXTS, Page, elements, parsed, replaced

# Words that decide what is shown: with others in their place it is another search.
DECIDE = {"fits", "out_of_memory", "refused", "cpu", "space", "none", "digest", "memory", "head"}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MANY = settings(max_examples=12, deadline=None)

Records = Callable[..., Record]


@pytest.fixture(scope="module", params=["answered", "nothing fits"])
def leaves(request: pytest.FixtureRequest, record: Records) -> dict[str, Any]:
    """A result.json with a word in every place that takes any."""
    found = record().result
    changes: dict[str, Any] = {
        "notes": ("a note", "1. another"),
        "source": {"data": "a file", "weights": "a model"},
    }
    changes["learning"] = (LearningCurve(found.trials[0].config, reason="no curve"),)
    if request.param == "nothing fits":
        missed = tuple(each for each in found.trials if not each.fits)
        changes |= {
            "best": None,
            "tiers": {},
            "runner_up": None,
            "alternatives": (),
            "trials": missed,
        }
    data = json.loads(record(**changes).to_text())

    numbers = itertools.count()
    named = functools.cache(lambda word: word if word in DECIDE else f"word-{next(numbers)}-")
    values_of = functools.partial(_values_named, named=named)
    data = values_of(data)
    data["workload"]["word-field"] = "word-fact-"
    data["versions"]["word-package-"] = "word-version-"
    data["options"]["set"] = {"word-knob-": ["word-value-"]}
    data["hardware"] |= {"measured_on": "word-card-", "allocator": "word-allocator-"}
    for config in _configs(data):
        config["word-knob-"] = "word-value-"
    for trial in data["trials"]:
        trial["warnings"] = ["word-warning-"]
    return data


def _values_named(data: Any, named: Callable[[str], str], key: str = "") -> Any:
    """Values, not keys, with a word for each; the name of a knob is a key elsewhere."""
    if isinstance(data, dict):
        return {name: _values_named(value, named, name) for name, value in data.items()}
    if isinstance(data, list):
        return [_values_named(each, named, key) for each in data]
    return named(data) if isinstance(data, str) and key != "knob" else data


def _configs(data: Any) -> list[dict[str, Any]]:
    """Every config in plain data."""
    if isinstance(data, list):
        return [config for each in data for config in _configs(each)]
    if not isinstance(data, dict):
        return []
    return ([data["config"]] if "config" in data else []) + _configs(list(data.values()))


def read(data: dict[str, Any], text: str, folder: Path) -> Record:
    """The record with the text behind every word, as it is read from its file."""
    changed = replaced(data, lambda word: f"{word}{text}" if word.startswith("word-") else word)
    (folder / "result.json").write_text(json.dumps(changed))
    return Record.load(folder / "result.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@MANY
@given(text=TEXTS)
@example(text=EVERYTHING)
def test_of_a_page_only_words_change(leaves: dict[str, Any], folder: Path, text: str) -> None:
    known, page = (Page(report_page(read(leaves, each, folder), folder)) for each in ("", text))
    assert page.tags <= known.tags
    assert page.scripts == known.scripts


@MANY
@given(text=TEXTS)
@example(text=EVERYTHING)
def test_pictures_stay_well_formed(leaves: dict[str, Any], folder: Path, text: str) -> None:
    known, drawn = (pictures(read(leaves, each, folder)) for each in ("", text))
    assert drawn.keys() == known.keys()
    for name, picture in drawn.items():
        assert elements(picture.document("")) <= elements(known[name].document("")), name


@MANY
@given(text=TEXTS)
@example(text=EVERYTHING)
def test_of_markdown_only_words_change(leaves: dict[str, Any], folder: Path, text: str) -> None:
    known, told = read(leaves, "", folder), read(leaves, text, folder)
    assert parsed("a.md", markdown(told)) == parsed("a.md", markdown(known))
    names = (f"word-a{text}", f"word-b{text}")
    changed = read({**leaves, "model": "word-model-"}, text, folder), told
    plain = read({**leaves, "model": "word-model-"}, "", folder), known
    compared = compare(*changed, names).to_markdown()
    assert parsed("a.md", compared) == parsed(
        "a.md", compare(*plain, ("word-a", "word-b")).to_markdown()
    )
    assert all(line.isprintable() for line in f"{markdown(told)}{compared}".split("\n"))


def shown(renderable: RenderableType) -> str:
    """What a terminal of colours gets, without the colours."""
    console = Terminal(file=StringIO(), width=100, force_terminal=True, color_system="truecolor")
    console.print(renderable)
    return COLOUR.sub("", console.file.getvalue())  # type: ignore[attr-defined]


@MANY
@given(text=TEXTS)
@example(text=EVERYTHING)
def test_a_terminal_gets_no_control_character(
    leaves: dict[str, Any], folder: Path, text: str
) -> None:
    told = read(leaves, text, folder)
    changed = read({**leaves, "model": "word-model-"}, text, folder)
    answer = result_table(told.result) if told.result.best else nothing_fits_view(told.result)
    comparison = compare(told, changed, (f"a{text}", f"b{text}")).to_terminal()
    for lines in (shown(answer), shown(comparison), explain(told.result)):
        assert "word-" in lines
        assert all(line.isprintable() for line in lines.split("\n"))


@MANY
@given(text=TEXTS)
@example(text=EVERYTHING)
def test_of_a_notebooks_cell_only_words_change(
    leaves: dict[str, Any], folder: Path, text: str
) -> None:
    known, cell = (result_html(read(leaves, each, folder).result) for each in ("", text))
    images = [
        re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', each) for each in (known, cell)
    ]
    for one, other in zip(*images, strict=True):
        assert elements(base64.b64decode(other).decode()) <= elements(
            base64.b64decode(one).decode()
        )
    tags = [Page(re.sub(r'src="data:[^"]*"', "", each)).tags for each in (known, cell)]
    assert tags[1] <= tags[0]
