"""The page: whole, of one file, safe, and without an empty box whatever a search came to."""

import dataclasses
import html.parser
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.core.config import Config
from autofit.core.hardware import GIB
from autofit.core.learning import LearningCurve
from autofit.core.measurement import Measurement, Outcome
from autofit.core.record import Record
from autofit.core.result import OnDevices
from autofit.report.html import pictures, report_page
from autofit.report.html.page import memory_used, shared_knobs, training_time

Records = Callable[..., Record]

VOID = {"meta", "link", "input", "br", "rect", "circle", "path", "line"}
EVIL = "<script>alert('1')</script>\"&"


class Reader(html.parser.HTMLParser):
    """Checks that what is opened is closed, and collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def headings(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self.rawdata)


def read(record: Record, folder: Path) -> Reader:
    return Reader(report_page(record, folder))


def test_everything_is_there(record: Records, tmp_path: Path) -> None:
    page = report_page(record(), tmp_path)
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Throughput against memory",
        "Where the memory goes",
        "What each knob buys",
        "Other budgets",
        "The search",
        "Predictions against measurements",
        "Every trial",
        "Where and with what",
    ]
    told = Reader(page).text
    for words in (
        "6,400 tokens per second",
        "1.50 of 2.00 GiB",
        "take 43.4 hours",
        "2 samples at a time, 4 times for each update",
        "autofit train",
        "best: all weights, 6,400",
        "temporary",
        "Nothing that was left is expected to be more than 4 % faster (at 95 %, by discounted speed).",
        "torch 2.13.0",
        "attention=sdpa,eager",
    ):
        assert words in told, words
    assert len(page) < 300_000


def test_it_needs_no_network(record: Records, tmp_path: Path) -> None:
    page = read(record(), tmp_path)
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "embed", "base", "img"), tag
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            given = attributes.get(name)
            assert given is None or given == "data:," or given.startswith(("#", "probes/")), (
                tag,
                given,
            )
    assert not re.search(
        r"url\(|@import|https?://(?!www\.w3\.org)", report_page(record(), tmp_path)
    )


def test_what_comes_from_users_is_only_words(record: Records, tmp_path: Path) -> None:
    evil = record(
        model=EVIL,
        notes=(EVIL,),
        versions={EVIL: EVIL},
        trials=tuple(
            dataclasses.replace(
                each,
                reason=f"Traceback\n{EVIL}",
                config=each.config.replace(attention=EVIL) if place == 7 else each.config,
            )
            for place, each in enumerate(record().result.trials)
        ),
    )
    evil = dataclasses.replace(
        evil, options={**evil.options, "space": EVIL, "set": {EVIL: (EVIL,)}}, finished=EVIL
    )
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "tool.yaml").write_text(EVIL)
    page = report_page(evil, tmp_path)
    assert "<script>alert" not in page
    scripts = [given.get("type") for tag, given in Reader(page).tags if tag == "script"]
    assert scripts == [*["application/json"] * len(evil.timelines), None]
    assert Reader(page).text.count("alert('1')") > 10
    for name, picture in pictures(evil).items():
        assert "<script" not in picture.document(""), name


def test_every_trial_is_a_row_that_can_be_sorted(record: Records, tmp_path: Path) -> None:
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "0003.log").write_text("it ran")
    page = report_page(record(), tmp_path)
    rows = re.findall(r'<tr id="trial-(\d+)".*?</tr>', page)
    assert rows == [str(number) for number in range(8)]
    columns = page.split("<thead>")[1].split("</thead>")[0].count("<button")
    for row in re.findall(r'<tr id="trial-\d+".*?</tr>', page, re.DOTALL):
        assert len(re.findall(r'<td class="[^"]*" data-key="[^"]+"', row)) == columns
    assert re.findall(r'href="(probes/[^"]+)"', page) == ["probes/0003.log"]
    links = set(re.findall(r'href="#(trial-\d+)"', page))
    assert links == {f"trial-{number}" for number in rows}


def test_the_work_of_a_page_grows_as_the_trials_do(
    record: Records,
    measured: Callable[..., Measurement],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Configs are compared some ten times for each trial, not with each other trial's."""
    compared: list[Config] = []
    equal = Config.__eq__

    def counting(self: Config, other: object) -> bool:
        compared.append(self)
        return equal(self, other)

    monkeypatch.setattr(Config, "__eq__", counting)
    counts = []
    for trials in (50, 200):
        others = [
            measured(10.0 + number, 1.0, micro_batch_size=number + 100) for number in range(trials)
        ]
        drawn = record(trials=(*others, *record().result.trials))
        compared.clear()
        report_page(drawn, tmp_path)
        counts.append(len(compared))
    assert counts[1] < 5 * counts[0]


def test_the_exports_that_there_are_can_be_copied(record: Records, tmp_path: Path) -> None:
    assert "For other tools" not in report_page(record(), tmp_path)
    (tmp_path / "exports" / "peft").mkdir(parents=True)
    (tmp_path / "exports" / "axolotl.yaml").write_text("bf16: true\n")
    (tmp_path / "exports" / "peft" / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "exports" / "huge.bin").write_text("0" * 200_000)
    told = read(record(), tmp_path).text
    assert "axolotl.yaml copy" in told
    assert "bf16: true" in told
    assert 'peft/adapter_config.json copy {"r": 8}' in told
    assert "huge" not in told


def missed(each: Measurement) -> Measurement:
    return dataclasses.replace(
        each,
        outcome=Outcome.OUT_OF_MEMORY,
        step_seconds=None,
        samples_per_second=None,
        tokens_per_second=None,
    )


def test_what_a_link_names_is_no_part_of_a_run(record: Records, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_text("a secret")
    exports = tmp_path / "run" / "exports"
    exports.mkdir(parents=True)
    (exports / "mine.yaml").write_text("mine: true")
    (exports / "link.yaml").symlink_to(elsewhere / "secret")
    (exports / "folder").symlink_to(elsewhere)
    os.mkfifo(exports / "pipe")
    page = report_page(record(), exports.parent)
    assert "mine: true" in page
    assert "secret" not in page

    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "exports").symlink_to(elsewhere)
    assert "secret" not in report_page(record(), tmp_path / "linked")


def test_a_huge_export_is_not_read(record: Records, tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    with (tmp_path / "exports" / "huge.yaml").open("wb") as file:
        file.truncate(20 * 2**30)  # of which the disk holds nothing
    assert "huge.yaml" not in report_page(record(), tmp_path)


def test_where_nothing_fits_it_says_what_would_help(record: Records, tmp_path: Path) -> None:
    trials = tuple(map(missed, record().result.trials))
    page = record(best=None, runner_up=None, tiers={}, trials=trials, alternatives=(), files={})
    told = read(page, tmp_path)
    assert "Nothing fits: tiny-llama on a test's CPU within 2.00 GiB." in told.text
    assert "What would help:" in told.text
    assert {"form", "svg"} & {tag for tag, _ in told.tags} == set()
    assert "Every trial" in told.text


def test_an_interrupted_search_without_predictions_leaves_no_empty_box(
    record: Records, tmp_path: Path
) -> None:
    whole = record(
        stopped_by="interrupt",
        frontier={},
        alternatives=(),
        other_budgets=(),
        predicted=False,
        bound=None,
    )
    bare = dataclasses.replace(whole, predicted=(), timelines={}, options={}, finished="")
    page = report_page(bare, tmp_path)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Throughput against memory",
        "The search",
        "Every trial",
        "Where and with what",
    ]
    assert "interrupted" in page
    assert "predicted" not in Reader(page).text
    for tag in ("figure", "section", "ul", "dd"):
        assert not re.search(rf"<{tag}[^>]*>\s*</{tag}>", page), tag


def test_nothing_measured_at_all(record: Records, tmp_path: Path) -> None:
    empty = record(
        best=None, runner_up=None, tiers={}, trials=(), frontier={}, alternatives=(), files={}
    )
    told = read(dataclasses.replace(empty, predicted=(), timelines={}), tmp_path).text
    assert "Nothing fits" in told
    assert "Every trial" not in told


def test_a_model_of_ones_own_is_trained_in_python(record: Records, tmp_path: Path) -> None:
    own = record(source={}, files={})
    own = dataclasses.replace(
        own,
        result=dataclasses.replace(
            own.result,
            workload={"task": "custom", "sequence_length": None, "effective_batch_size": 8},
            best=dataclasses.replace(own.result.best, tokens_per_second=None)
            if own.result.best
            else None,
            trials=tuple(
                dataclasses.replace(each, tokens_per_second=None) for each in own.result.trials
            ),
        ),
    )
    told = read(own, tmp_path).text
    assert "autofit.fit(model, loader, config=config" in told
    assert "100 samples per second" in told
    assert "tokens" not in told.replace("tokens_per_second", "")
    assert "QLoRA" not in told  # nothing of it was drawn


def test_what_finalists_learn(record: Records, tmp_path: Path) -> None:
    assert "What the finalists learn" not in report_page(record(), tmp_path)
    judged = record()
    assert judged.result.best
    other = LearningCurve(
        judged.result.best.config.replace(precision="fp32"), reason="memory ran out"
    )
    curve = LearningCurve(judged.result.best.config).with_run([1.0] * 20, [3.0] * 18 + [2.25] * 2)
    judged = dataclasses.replace(
        judged, result=dataclasses.replace(judged.result, learning=(curve, other))
    )
    assert "loss-by-seconds" in pictures(judged)
    told = read(judged, tmp_path).text
    assert "What the finalists learn" in told
    assert "loss 2.2500: " in told


def test_other_numbers_of_devices(record: Records, tmp_path: Path) -> None:
    assert "Other numbers of devices" not in report_page(record(), tmp_path)
    found = (
        OnDevices(1, 9 * GIB, 100.0),
        OnDevices(2, 5 * GIB, 190.0),
        OnDevices(4, 3 * GIB, 350.0),
    )
    several = record()
    several = dataclasses.replace(
        several, result=dataclasses.replace(several.result, on_devices=found)
    )
    assert {"memory-by-devices", "speed-by-devices"} <= pictures(several).keys()
    told = read(several, tmp_path).text
    assert "Other numbers of devices" in told
    assert "2 devices: 190" in told
    unknown = tuple(dataclasses.replace(each, rate=None) for each in found)
    several = dataclasses.replace(
        several, result=dataclasses.replace(several.result, on_devices=unknown)
    )
    assert "speed-by-devices" not in pictures(several)


@pytest.mark.parametrize(
    "name",
    ["throughput-against-memory", "memory-breakdown", "memory-timeline-lora", "what-knobs-buy"],
)
def test_pictures_have_names(record: Records, name: str) -> None:
    assert name in pictures(record())


def test_what_all_trials_share_is_told_whole(record: Records) -> None:
    trials = [each for each in record().result.trials if each.config["micro_batch_size"] == 8][:2]
    assert (
        shared_knobs(record(trials=tuple(trials)).result)
        == "micro-batch 8x1, adamw, sdpa attention"
    )
    assert shared_knobs(record(trials=tuple(trials[:1])).result) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (12, "12 seconds"),
        (90, "1.5 minutes"),
        (7200, "2 hours"),
        (172_800, "2 days"),
        (3.2e9, "37,037 days"),
    ],
)
def test_times_to_train(seconds: float, words: str) -> None:
    assert training_time(seconds) == words


def test_the_bar_shows_what_may_be_used(record: Records) -> None:
    result = record().result
    assert result.best
    assert memory_used(result.best, result) == ("1.50", 0.75)
    assert memory_used(dataclasses.replace(result.best, peak_bytes=None), result) is None
    card = dataclasses.replace(result.hardware, device="cuda")
    here, there = (report_page(record(**changes), Path()) for changes in ({}, {"hardware": card}))
    assert '<span style="width:75.0%"></span></div>' in here
    assert '<span style="width:75.0%"></span><i style="left:95.0%"></i>' in there
    assert "1.90 GiB usable, the rest is kept free" in there
