"""Throughput against memory: every measured config is where it was measured, what ran out is beyond the budget."""

import dataclasses
import re
from collections.abc import Callable

from autofit.core.hardware import GIB
from autofit.core.record import Predicted, Record
from autofit.report.html.scatter import scatter

Records = Callable[..., Record]


def test_every_config_is_a_link_to_its_trial(record: Records) -> None:
    picture = scatter(record())
    assert picture
    markup = picture.markup()
    fitting = set(re.findall(r'<a href="#trial-(\d)" class="dot (?!missed)', markup))
    missed = set(re.findall(r'<a href="#trial-(\d)" class="dot missed', markup))
    assert fitting == {"1", "2", "3", "4", "5"}
    assert missed == {"0", "6"}  # 7 was refused: it has no place among them
    assert "probe 1: fp32, micro-batch 8x1, adamw, sdpa attention \u2014 out of memory" in markup


def test_what_ran_out_is_beyond_the_budget(record: Records) -> None:
    whole = record()
    # predicted to fit, and did not
    tiny = tuple(Predicted(0.1 * GIB, 0.1) for _ in whole.result.trials)
    picture = scatter(dataclasses.replace(whole, predicted=tiny))
    assert picture
    markup = picture.markup()
    line = re.search(r'<line x1="([\d.]+)"[^>]*class="budget"', markup)
    assert line
    crosses = re.findall(r'class="dot missed[^>]*>.*?<path d="M([\d.]+),', markup)
    assert len(crosses) == 2
    assert all(float(x) + 3.6 > float(line[1]) for x in crosses)


def test_what_is_predicted_is_hollow_and_dashed(record: Records) -> None:
    picture = scatter(record())
    assert picture
    assert picture.markup().count('class="guess"') == 1
    assert picture.markup().count('class="guessed"') == 1
    bare = scatter(record(frontier={}))
    assert bare
    assert "guess" not in bare.markup()


def test_on_a_card_what_may_be_used_is_the_limit(record: Records) -> None:
    cuda = dataclasses.replace(record().result.hardware, device="cuda")
    picture = scatter(record(hardware=cuda))
    assert picture
    assert "1.90 usable of 2.00 GiB" in picture.markup()


def test_there_is_none_where_nothing_fits(record: Records) -> None:
    assert (
        scatter(record(best=None, tiers={}, runner_up=None, trials=record().result.trials[:1]))
        is None
    )
