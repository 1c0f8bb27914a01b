import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autofit.core.config import Config
from autofit.core.constraints import Constraints
from autofit.core.measurement import Outcome
from autofit.core.options import SearchOptions
from autofit.estimate.rates import UNKNOWN
from autofit.search.predictions import Predictions
from autofit.search.space import Space
from autofit.tuning.space import legal_configs
from benchmarks import replay, replay_answers
from benchmarks.record_table import Row, Table, workload_named
from benchmarks.replay import regrets_of, summary
from benchmarks.replay_samplers import ALL, SAMPLERS, Problem, Replay
from benchmarks.replay_samplers import replay as replay_one
from tests.tiny import CPU

SIZES, PRECISIONS = (1, 2, 4, 8), ("bf16", "fp32")
OFF = {"micro_batch_size": 1, "precision": "fp32"}
SPACE = Space("six", "", {"precision": PRECISIONS, "micro_batch_size": SIZES})
RULES = Constraints(off=OFF, canonicalize={}, refuse={})


def _row(precision: str, size: int) -> Row:
    """Twice as fast and half as large in bf16; the larger the micro-batch, the faster; repeats 10 % apart."""
    seconds = (2.0 if precision == "fp32" else 1.0) + 1.0 / size
    times = [
        {"median": seconds * part, "low": seconds, "high": seconds} for part in (0.95, 1.0, 1.05)
    ]
    probes = [
        {"step_seconds": time, "build_seconds": 1.0, "warmup_seconds": 2.0, "seconds": 10.0}
        for time in times
    ]
    peak = size * (200 if precision == "fp32" else 100)
    return Row(
        Config({"precision": precision, "micro_batch_size": size}), Outcome.FITS, peak, None, probes
    )


def _problem(budget: int, off_by: Callable[[Row], float] = lambda row: 1.0) -> Problem:
    rows = [_row(precision, size) for precision in PRECISIONS for size in SIZES]
    seconds = [(row.step_seconds or 0.0) * off_by(row) for row in rows]
    expected = Predictions.of(
        [row.config for row in rows], [float(row.peak_bytes or 0) for row in rows], seconds
    )
    return Problem(SPACE, RULES, expected, {row.config: row for row in rows}, budget, samples=8)


def test_a_probe_above_the_budget_runs_out_of_memory_before_any_step_is_timed() -> None:
    problem = _problem(budget=500)
    large = problem.measure(
        Config({"precision": "bf16", "micro_batch_size": 8}), 0, random.Random(0)
    )
    small = problem.measure(
        Config({"precision": "bf16", "micro_batch_size": 4}), 1, random.Random(0)
    )
    assert (large.outcome, large.seconds, large.step_seconds) == (Outcome.OUT_OF_MEMORY, 3.0, None)
    assert (small.outcome, small.seconds) == (Outcome.FITS, 10.0)
    assert small.step_seconds
    assert small.step_seconds.median in (0.95 * 1.25, 1.25, 1.05 * 1.25)
    assert problem.best == pytest.approx(8 / 1.25)


def test_regret_is_by_the_median_of_all_probes_and_whole_while_nothing_fits() -> None:
    problem = _problem(budget=500)
    run = Replay(problem, random.Random(0), most=3)
    for precision, size in (("fp32", 8), ("fp32", 1), ("bf16", 4)):
        run.probe(Config({"precision": precision, "micro_batch_size": size}))
    assert regrets_of(problem, run) == pytest.approx([1.0, 1 - 1.25 / 3.0, 0.0])
    assert run.is_over
    figures = summary(problem, [run])
    assert figures["fitting"] == 5
    assert figures["probes_until_close"] == 3
    assert figures["seconds_until_close"] == pytest.approx(3.0 + 10.0 + 10.0)
    assert figures["out_of_memory"] == pytest.approx(1 / 3)
    assert figures["mean_regret"]["40"] == 0.0
    assert figures["bound_held"] is None


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_ends_measures_nothing_twice_and_is_the_same_for_a_seed(name: str) -> None:
    problem = _problem(budget=500)
    first, again = (replay_one(name, problem, 3, 6) for _ in range(2))
    assert first.seen == again.seen
    assert 1 <= len(first.seen) <= 6
    assert len({seen.config for seen in first.seen}) == len(first.seen)


def test_with_right_predictions_the_first_probe_is_the_best_and_with_wrong_ones_it_is_still_found() -> (
    None
):
    right, wrong = (
        _problem(budget=500),
        _problem(500, lambda row: 2.5 if row.config["precision"] == "bf16" else 1.0),
    )
    assert regrets_of(right, replay_one("by-estimate", right, 0, 8))[0] == 0.0
    assert regrets_of(right, replay_one("autofit", right, 0, 8))[0] == 0.0
    assert regrets_of(wrong, replay_one("by-estimate", wrong, 0, 8))[0] > 0.4
    assert regrets_of(wrong, replay_one("autofit", wrong, 0, 8))[-1] == 0.0


def test_what_an_earlier_search_measured_corrects_wrong_predictions_before_the_first_probe() -> (
    None
):
    wrong = _problem(500, lambda row: 2.5 if row.config["precision"] == "bf16" else 1.0)
    alone, told = (replay_one("autofit", wrong, 0, 8, known=count) for count in (0, 6))
    assert regrets_of(wrong, alone)[0] > 0.1
    assert regrets_of(wrong, told)[0] == 0.0
    assert len(told.seen) < len(alone.seen)
    assert {each.config for each in told.known} > {each.config for each in told.seen}
    timed = [each for each in told.known if each.step_seconds]
    shares = [
        each.step_seconds * wrong.throughput(each.config) / 8 for each in timed if each.step_seconds
    ]
    assert shares
    # a slower day, and its noise
    assert all(1.15 * 0.95 <= share * 1.0001 <= 1.15 * 1.06 for share in shares)


def test_tools_that_search_the_micro_batch_alone_leave_all_else_at_its_default() -> None:
    problem = _problem(budget=500)
    up = [
        (each.config["precision"], each.config["micro_batch_size"])
        for each in replay_one("doubling", problem, 0, 9).seen
    ]
    down = [
        (each.config["precision"], each.config["micro_batch_size"])
        for each in replay_one("halving", problem, 0, 9).seen
    ]
    assert up == [("fp32", 1), ("fp32", 2), ("fp32", 4)]
    assert down == [("fp32", 8), ("fp32", 4), ("fp32", 2)]


def test_a_table_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space, path = tmp_path / "four.yaml", tmp_path / "table.json"
    space.write_text(
        "description: Four.\nknobs:\n  precision: [bf16, fp32]\n  micro_batch_size: [4, 8]\n"
    )
    options, workload = SearchOptions(space=str(space), device="cpu"), workload_named("cnn")
    # as it is looked at
    configs = [config.replace(attention=None) for config in legal_configs(options, workload, CPU)]
    rows = [
        _row(str(config["precision"]), int(config["micro_batch_size"] or 1)) for config in configs
    ]
    about = {
        "model": "cnn",
        "space": str(space),
        "effective_batch_size": 8,
        "hardware": asdict(CPU),
    }
    table = Table(
        {**about, "rates": asdict(UNKNOWN)},
        [replace(row, config=c) for row, c in zip(rows, configs, strict=True)],
    )
    table.write(path)
    replay.main(
        [
            str(path),
            "--sampler",
            "autofit",
            "halving",
            "--seeds",
            "2",
            "--probes",
            "4",
            "--known",
            "2",
            "--json",
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert [each["sampler"] for each in found] == ["autofit", "halving"] * 3
    assert [each["fitting"] for each in found[::2]] == [1, 3, 3]  # two need the same
    assert all(
        a["mean_regret"]["5"] <= b["mean_regret"]["5"]
        for a, b in zip(found[::2], found[1::2], strict=True)
    )
    replay.main(
        [str(path), "--sampler", "random", "--budget", "1", "--seeds", "1", "--probes", "4"]
    )
    assert "random" in capsys.readouterr().out.splitlines()[-1]

    table.rows.pop()
    table.write(path)
    with pytest.raises(SystemExit, match="record it again"):
        replay.main([str(path)])


def test_answers_are_told_by_the_number_of_probes() -> None:
    problem = _problem(budget=500)
    found = replay_answers.regrets(problem, 2)
    assert set(found) == set(replay.AT)
    assert found[40] == {ALL: 0.0, "full": 0.0}  # all are measured then
    least = min(of_all[ALL] for of_all in found.values())
    worse = {**found, 25: {ALL: 0.02}}
    assert replay_answers.worse(worse) == pytest.approx(0.02 - least)
    assert "40 probes" in replay_answers.line("cnn", found)


def test_what_a_search_says_of_the_rest_is_held_against_the_truth() -> None:
    problem = _problem(budget=500)
    second = Config({"precision": "bf16", "micro_batch_size": 2})
    runs = [
        Replay(problem, random.Random(0), 1, leaders=[second], bound=bound) for bound in (0.1, 0.3)
    ]
    for run in runs:
        run.probe(second)
    # the best that is left is 1.5 / 1.25 as fast
    assert summary(problem, runs)["bound_held"] == 0.5


def test_workers_are_simulated_side_by_side_each_as_fast_as_alone() -> None:
    problem = _problem(2000, lambda row: 2.5 if row.config["precision"] == "bf16" else 1.0)
    one, two, again = (
        replay_one("autofit-on", problem, 0, 8, workers=workers) for workers in (1, 2, 2)
    )
    assert two.seen == again.seen
    assert [len(each.seen) for each in (one, two)] == [8, 8]
    assert one.ended[-1] == sum(each.seconds for each in one.seen)
    assert two.ended == sorted(two.ended)
    assert two.ended[0] == two.ended[1] == 10.0  # a probe that fits takes that long
    assert two.ended[-1] == one.ended[-1] / 2
    assert summary(problem, [two])["seconds"] == two.ended[-1]


def test_without_predictions_it_takes_more_probes_and_the_more_workers_the_less_time() -> None:
    problem = _problem(2000)
    seeing, blind, four = (
        replay_one("autofit", problem, 0, 8, workers=workers, blind=blind)
        for workers, blind in ((1, False), (1, True), (4, True))
    )
    assert len(seeing.seen) < len(blind.seen)
    assert four.ended[len(four.seen) - 1] < blind.ended[len(blind.seen) - 1]


def test_only_autofit_is_replayed_with_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        replay.main(["--sampler", "tpe", "--workers", "2"])
    assert "autofit" in capsys.readouterr().err
