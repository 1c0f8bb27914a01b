"""What a run tells while it runs: files that can be read again, also after a kill, and the bar."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from autofit.training.evaluation import Evaluation
from autofit.training.loop import StepReport
from autofit.training.metrics import Bar, MetricsFile, ProgressLines, TensorBoard, recorded

REPORT = StepReport(step=1, loss=2.5, lr=1e-4, samples=8, seconds=0.5, data_seconds=0.25)


def written(path: Path, steps: range, first_step: int = 0) -> None:
    metrics = MetricsFile(path, first_step=first_step)
    for step in steps:
        metrics(replace(REPORT, step=step + 1))
    metrics.evaluated(Evaluation(1.5, steps[-1] + 1, {}))
    metrics.close()


def test_json_lines(tmp_path: Path) -> None:
    written(tmp_path / "deep" / "metrics.jsonl", range(2))
    first, _, last = map(json.loads, (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines())
    assert first == {
        "step": 1,
        "loss": 2.5,
        "lr": 1e-4,
        "samples": 8,
        "seconds": 0.5,
        "data_seconds": 0.25,
    }
    assert last == {"step": 2, "evaluation": 1.5}


def test_a_resumed_run_goes_on_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, range(5))
    with path.open("a") as file:
        file.write('{"step": 9, "lo')  # killed in the middle of a line
    written(path, range(3, 5), first_step=3)
    whole = tmp_path / "whole.jsonl"
    written(whole, range(5))
    assert path.read_text() == whole.read_text()


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe{}\n",
        b"[" * 100_000 + b"\n",
        b"3\n",
        b'{"step": "x"}\n',
        b"1" * 5000 + b"\n",
        b"\0" * 4096,
    ],
)
def test_damaged_lines_are_left_out_and_the_run_goes_on(tmp_path: Path, damage: bytes) -> None:
    written(tmp_path / "metrics.jsonl", range(2))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    written(tmp_path / "metrics.jsonl", range(2, 3), first_step=2)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 2, 3, 3]


def test_a_folder_in_the_way_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    written(tmp_path / "metrics.jsonl", range(2))
    assert (tmp_path / "metrics.jsonl").is_file()
    assert [each.suffix for each in tmp_path.iterdir() if each.is_dir()] == [".aside"]


def test_a_run_that_begins_anew_leaves_nothing_of_the_former(tmp_path: Path) -> None:
    written(tmp_path / "metrics.jsonl", range(5))
    written(tmp_path / "metrics.jsonl", range(1))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_every_line_is_there_at_once(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics(REPORT)
    assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
    metrics.close()


def test_the_bar_says_loss_and_waiting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # room for whatever rate of steps
    monkeypatch.setenv("LINES", "40")
    bar = Bar(4, first_step=2)
    bar(REPORT)
    bar.evaluated(Evaluation(1.25, 2, {}))
    bar(replace(REPORT, step=3))
    bar.close()
    out, err = capsys.readouterr()
    assert not out
    assert "training (evaluation loss 1.25)" in err
    assert "4/4" in err
    assert "loss=2.5" in err
    assert "waiting=33%" in err


def test_a_bar_is_for_somebody_who_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not Bar.wanted()
    monkeypatch.setattr("autofit.training.metrics.in_notebook", lambda: True)
    assert Bar.wanted()


def test_off_a_terminal_a_line_now_and_then_tells_speed_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter((0.0, 4.0, 12.0, 20.0, 80.0, 90.0))
    monkeypatch.setattr("autofit.training.metrics.time.monotonic", lambda: next(now))
    lines = ProgressLines(104, first_step=2)
    for step in range(3, 7):
        lines(replace(REPORT, step=step))
    lines.evaluated(Evaluation(1.25, 6, {"accuracy": 0.5}))
    lines(replace(REPORT, step=104))

    rate = 2 * REPORT.samples / 12
    last = 5 * REPORT.samples / 90
    assert capsys.readouterr().err.splitlines() == [
        f"step 4 of 104: loss 2.5, {rate:.4g} samples/s, 10 min left",
        f"step 6 of 104: loss 2.5, {4 * REPORT.samples / 80:.4g} samples/s, 33 min left",
        "after step 6: evaluation loss 1.25, accuracy 0.5",
        f"step 104 of 104: loss 2.5, {last:.4g} samples/s, 0 s left",
    ]


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file(REPORT)
    evaluation = Evaluation(1.25, REPORT.step, {"accuracy": 0.5})
    file.evaluated(evaluation)
    file(replace(REPORT, step=REPORT.step + 1))
    reports, evaluations = recorded(tmp_path / "metrics.jsonl", REPORT.step)
    assert reports == [REPORT]
    assert reports[0].memory == REPORT.memory
    assert evaluations == [evaluation]
    assert (evaluations[0].step, evaluations[0].metrics) == (REPORT.step, {"accuracy": 0.5})
    file.close()
    assert recorded(tmp_path / "nowhere", 9) == ([], [])


def test_in_a_notebook_the_bar_is_a_cells_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("autofit.training.metrics.in_notebook", lambda: True)
    monkeypatch.setattr("autofit.training.metrics.Cell.show", lambda self, text: shown.append(text))
    bar = Bar(2)
    bar(REPORT)
    bar.evaluated(Evaluation(1.25, 1, {}))
    bar(replace(REPORT, step=1))
    bar.close()
    bar.close()
    assert "0/2" in shown[0]
    assert "training (evaluation loss 1.25): 100%" in shown[-1]
    assert "loss=2.5" in shown[-1]
    assert capsys.readouterr() == ("", "")


def test_tensorboard_gets_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen.append((name, value, step))

        def close(self) -> None:
            seen.append(("closed", 0, 0))

    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    board = TensorBoard(tmp_path)
    board(REPORT)
    board.evaluated(Evaluation(1.5, 0, {}))
    board.close()
    assert seen == [
        ("train/loss", 2.5, 1),
        ("train/lr", 1e-4, 1),
        ("train/samples_per_second", 16.0, 1),
        ("evaluation/loss", 1.5, 0),
        ("closed", 0, 0),
    ]


def test_lines_that_are_none_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, range(3))
    before = path.read_text()
    path.write_text(f"\0\0\n\n{{}}\n{before}")
    MetricsFile(path, first_step=9).close()
    assert path.read_text() == before
