import json
from pathlib import Path
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import ProbeError
from autofit.core.measurement import Measurement, Outcome
from autofit.probe import LocalExecutor
from benchmarks import peers
from benchmarks.peer_tools import Found
from benchmarks.peers import Answer, Problem
from benchmarks.record_table import workload_named
from tests.tiny import CPU

FAST, SLOW, LARGE = (Config({"micro_batch_size": size}) for size in (4, 2, 8))


def _answer(tool: str, config: Config | None, rates: tuple[float, ...] = ()) -> Answer:
    return Answer(tool, config, 3, 1, 2.0, None if config else "too large", rates=list(rates))


def _measured(config: Config) -> Measurement:
    if config == LARGE:
        return Measurement(config, Outcome.OUT_OF_MEMORY)
    return Measurement(config, Outcome.FITS, samples_per_second=20.0 if config == FAST else 10.0)


class Asked:
    """A LocalExecutor whose children return `found`, or die."""

    def __init__(self, found: Found | None) -> None:
        self.found = found

    def run(self, *_: Any, **__: Any) -> Found:
        if self.found is None:
            raise ProbeError("its process ended: killed by SIGKILL.")
        return self.found


def _row(name: str = "cnn", budget: str = "medium") -> dict[str, Any]:
    answers = [
        _answer("full", FAST, (20.0, 30.0, 28.0)),
        _answer("accelerate", SLOW, (10.0, 10.0, 20.0)),
    ]
    answers += [_answer("lightning", SLOW, (10.0, 10.0, 20.0)), _answer("deepspeed", None)]
    found = {"workload": name, "budget": budget, "budget_gib": 0.2, "ratios": peers.ratios(answers)}
    return {**found, "answers": [answer.to_dict() for answer in answers]}


@pytest.mark.parametrize(
    ("batch_size", "effective", "micro"),
    [(2, 8, 2), (7, 16, 4), (9, 16, 8), (64, 16, 16), (1, 7, 1), (5, 7, 1)],
)
def test_a_batch_size_becomes_the_largest_micro_batch_that_divides(
    batch_size: int, effective: int, micro: int
) -> None:
    assert peers.micro_batch(batch_size, effective) == micro


def test_an_answer_is_plain_training_with_its_micro_batch(executor: LocalExecutor) -> None:
    tight, medium, ample = peers.problems(executor, "cnn", list(peers.BUDGETS))
    assert tight.nbytes < medium.nbytes < ample.nbytes
    found = Found(9, (16, 14, 12, 10, 9), 4, 1.0)
    answer = peers.found_by_peer(Asked(found), medium, "accelerate")  # type: ignore[arg-type]
    assert answer.config
    assert (answer.tried, answer.out_of_memory, answer.batch_size) == (5, 4, 9)
    on = {
        knob: value
        for knob, value in answer.config.items()
        if value not in (None, False, 0, "none", "standard")
    }
    assert on == {
        "precision": "fp32",
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": "adamw",
    }


@pytest.mark.parametrize("found", [None, Found(None, (2, 1), 2, 1.0, "ValueError: batch_size=0")])
def test_a_tool_that_finds_nothing_has_no_config_but_a_reason(found: Found | None) -> None:
    problem = Problem("cnn", "tight", 1000, workload_named("cnn"), CPU)
    answer = peers.found_by_peer(Asked(found), problem, "lightning")  # type: ignore[arg-type]
    assert answer.config is None
    assert ("SIGKILL" if found is None else "batch_size=0") in (answer.reason or "")


def test_answers_are_probed_in_turn_once_where_they_are_the_same() -> None:
    seen: list[Config] = []
    answers = [
        _answer("full", FAST),
        _answer("accelerate", SLOW),
        _answer("lightning", SLOW),
        _answer("late", LARGE),
    ]

    def measure(config: Config) -> Measurement:
        seen.append(config)
        return _measured(config)

    peers.time_in_turn(answers, measure, 3)
    assert seen == [FAST, SLOW, LARGE, SLOW, FAST, FAST, SLOW]
    assert [answer.rates for answer in answers] == [[20.0] * 3, [10.0] * 3, [10.0] * 3, []]
    assert answers[-1].config is None
    assert "out of memory" in (answers[-1].reason or "")


def test_nothing_is_probed_where_nothing_was_found() -> None:
    peers.time_in_turn([_answer("full", None)], lambda config: pytest.fail("probed"), 3)


def test_a_ratio_is_of_rounds() -> None:
    ratio = _row()["ratios"]["full"]
    assert ratio["accelerate"] == {"median": 2.0, "low": 1.4, "high": 3.0}
    assert "deepspeed" not in ratio


def test_a_report_tells_ratios_and_who_found_nothing() -> None:
    told = peers.report(_row()).splitlines()
    assert "full x 2.00 (1.40-3.00)" in told[2]
    assert "micro_batch_size" not in told[2]
    assert told[4].endswith("fits nothing: too large")
    assert "full x 2.00 (1.40-3.00) (accelerate)" in peers.summary([_row()])
    nothing = {
        **_row(),
        "answers": [_answer("full", FAST, (1.0,)).to_dict()],
        "ratios": {"full": {}},
    }
    assert "none of the others" in peers.summary([nothing])


def test_the_same_config_is_said_to_be_the_same() -> None:
    both = [_answer("exact", SLOW, (10.0, 11.0)), _answer("accelerate", SLOW, (10.0, 11.0))]
    row = {**_row(), "answers": [each.to_dict() for each in both], "ratios": peers.ratios(both)}
    assert "exact the same" in peers.report(row)


def test_rows_are_kept_in_order_and_replaced_but_not_beside_those_of_other_versions(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results" / "peers.json"
    for row in (
        _row("cnn"),
        _row("gpt2"),
        {**_row("cnn"), "budget_gib": 0.3},
        _row("gpt2", "tight"),
    ):
        peers.keep(path, {"torch": "1"}, row)
    rows = json.loads(path.read_text())["problems"]
    assert [(row["workload"], row["budget"], row["budget_gib"]) for row in rows] == [
        ("gpt2", "tight", 0.2),
        ("gpt2", "medium", 0.2),
        ("cnn", "medium", 0.3),
    ]
    peers.keep(path, {"torch": "2"}, _row("cnn"))
    assert len(json.loads(path.read_text())["problems"]) == 1


def test_what_is_not_installed_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert "pip install deepspeed tabulate" in (peers.missing("deepspeed") or "")
    assert peers.missing("accelerate") is None


def test_a_search_answers_with_what_it_spent(
    shared_zygote: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {
        "optimizer": "adamw",
        "activation_checkpointing": "none",
        "micro_batch_size": 16,
        "attention": "sdpa",
    }
    search = peers.autofit.search
    # what would help takes seconds to find out
    monkeypatch.setattr("autofit.tuning.annotations.Annotator.remedies", lambda *_: ())
    monkeypatch.setattr(
        peers.autofit, "search", lambda workload, **options: search(workload, **options, set=plain)
    )
    problem = Problem("cnn", "tight", 1000, workload_named("cnn"), CPU)
    answer = peers.found_by_autofit(problem, "exact")
    assert (answer.tool, answer.config, answer.reason) == ("exact", None, "nothing fits")
