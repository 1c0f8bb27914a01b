"""The page of a long search: what a person looks at is drawn, the rest is data on demand."""

import dataclasses
import json
import re
from pathlib import Path

from autofit.core.config import Config
from autofit.core.record import Record
from autofit.report.html.charts import progress
from autofit.report.html.page import report_page
from autofit.report.html.scatter import plotted
from autofit.report.rows import MOST_DRAWN, drawn_trials
from benchmarks.scale.reports import MOST_BYTES, record_of

LONG = record_of(1_000)
_DATA = re.compile(r'<div class="further">.*?<script type="application/json">(.*?)</script>')


def test_every_trial_of_a_long_search_is_drawn_or_data(tmp_path: Path) -> None:
    page = report_page(LONG, tmp_path)
    drawn = {int(number) for number in re.findall(r'<tr id="trial-(\d+)"', page)}
    data = json.loads(_DATA.search(page)[1])
    others = {row[0] - 1 for row in data["rows"]}
    assert len(drawn) == MOST_DRAWN
    assert drawn.isdisjoint(others)
    assert drawn | others == set(range(1_000))
    assert "show the other 700 trials" in page
    assert set(re.findall(r'href="#trial-(\d+)"', page)) <= set(map(str, drawn))


def test_what_is_data_says_what_a_row_would(tmp_path: Path) -> None:
    data = json.loads(_DATA.search(report_page(LONG, tmp_path))[1])
    heads = 11
    for row in data["rows"]:
        assert len(row) == heads
        trial = LONG.result.trials[row[0] - 1]
        words = ", ".join(data["words"][place] for place in row[1])
        assert str(trial.config["micro_batch_size"]) in words
        assert data["outcomes"][row[3]]
        assert data["tiers"][row[2]]
        assert bool(row[4]) == trial.fits
        assert row[-1] == f"{trial.seconds:.1f}"


def test_the_best_and_the_fastest_are_drawn() -> None:
    result = LONG.result
    drawn = [result.trials[place] for place in drawn_trials(result)]
    assert result.best.config in {trial.config for trial in drawn}
    fastest = sorted(result.trials, key=lambda trial: -trial.throughput)[: MOST_DRAWN // 3]
    assert {trial.number for trial in fastest} <= {trial.number for trial in drawn}
    assert {trial.number * 10 // 1_000 for trial in drawn} == set(range(10))  # of each part
    assert len(plotted(LONG)) == MOST_DRAWN


def test_a_short_search_is_drawn_as_a_whole(tmp_path: Path) -> None:
    record = record_of(MOST_DRAWN)
    page = report_page(record, tmp_path)
    assert _DATA.search(page) is None
    assert page.count('<tr id="trial-') == MOST_DRAWN
    assert len(plotted(record)) == MOST_DRAWN


def test_the_stair_of_the_best_so_far_is_of_all_trials() -> None:
    whole = progress(LONG, by="probe").markup()
    result = dataclasses.replace(LONG.result, trials=LONG.result.trials[:-1])
    one_less = progress(Record(result, LONG.options), by="probe").markup()
    stair = re.compile(r'<path d="([^"]*)" class="leading"')
    assert stair.search(whole)[1].count("H") < 30
    assert stair.search(whole)[1] != stair.search(one_less)[1]


def test_no_value_of_a_config_ends_the_data(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)"
    trials = [
        dataclasses.replace(trial, config=Config({**trial.config, "precision": evil}))
        for trial in LONG.result.trials
    ]
    result = dataclasses.replace(LONG.result, trials=tuple(trials))
    page = report_page(Record(result, LONG.options), tmp_path)
    assert evil not in page
    assert "<script>alert" not in page


def test_a_page_stays_small_however_long_the_search_was(tmp_path: Path) -> None:
    few, many = (len(report_page(record_of(trials), tmp_path)) for trials in (2_000, 6_000))
    each = (many - few) / 4_000
    assert few + 18_000 * each < MOST_BYTES
