"""The command for CUDA machines, rehearsed on the CPU: stopped in the middle, as a user runs it, and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from autofit.probe import LocalExecutor
from benchmarks.gpu import run
from benchmarks.gpu.measured import STAGE as MEASURED
from benchmarks.gpu.store import Store
from tests import warm
from tests.benchmarks.gpu.rows import with_executor

ROOT = Path(__file__).resolve().parents[3]
# The list is rehearsed by the commands of a quarter of an hour.
STAGES = ["search", "loop", "peers", "memory", "speed", "correct", "ranks", "levers"]
SMOKE = ["--smoke", "--stage", *STAGES]


def begun(out: Path) -> subprocess.Popen[str]:
    # of the stage that is stopped alone: all others are rehearsed in this process, with the zygote that is there
    command = ["-m", "benchmarks.gpu", "--smoke", "--out", str(out), "--stage", "memory"]
    return warm.python(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def measured(store: Store) -> dict[str, Any]:
    store.reload()
    return {key: row for key, row in store.rows(MEASURED).items() if "measurement" in row}


def results_in(store: Store) -> list[str]:
    """What stages left, but for how each of them ended."""
    lines = store.path.read_text().splitlines()
    return [line for line in lines if json.loads(line)["stage"] != "stage"]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=280)
    return process.returncode, out + err


# the command needs the alarm; a minute where others use the cores too
@pytest.mark.timeout(600, method="thread")
def test_a_rehearsal_that_is_stopped_goes_on_and_every_stage_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: LocalExecutor
) -> None:
    store = Store(tmp_path / "gpu-smoke" / "items.jsonl")
    first = begun(tmp_path)
    while not measured(store) and first.poll() is None:
        time.sleep(0.2)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGTERM)
    code, said = ended(first)
    assert code == 143, said
    assert "| memory | stopped |" in said
    assert not [
        each
        for each in psutil.wait_procs(children, timeout=20)[1]
        if each.status() != psutil.STATUS_ZOMBIE
    ]
    before = measured(store)
    assert before

    with_executor(monkeypatch, executor)
    monkeypatch.chdir(ROOT)
    assert run.main([*SMOKE, "--out", str(tmp_path)]) == 0
    assert before.items() <= measured(store).items(), "what was measured is not measured again"
    results = json.loads((tmp_path / "gpu-smoke" / "results.json").read_text())
    stages = {row["stage"]: row for row in results["stages"] if row["stage"] in STAGES}
    assert {stages[name]["outcome"] for name in STAGES} == {"done"}
    figures = {name: stages[name]["figures"] for name in STAGES}
    assert figures["search"]["measured afterwards"] == 2
    assert figures["correct"]["skipped"] >= 5 or Path("/dev/nvidia0").exists()
    assert figures["memory"]["allocated worst"] < 0.1
    for stage, name in (
        ("speed", "utilisation"),
        ("loop", "train.py off by"),
        ("peers", "over the best peer"),
    ):
        assert figures[stage][name] >= 0, name
    assert figures["loop"]["train.py peak of the probe's"] < 1.2
    assert (
        len(json.loads((tmp_path / "gpu-smoke" / "levers.json").read_text()))
        == figures["levers"]["levers"]
        == 3
    )
    assert [each["reached"] for each in results["numbers"] if each["seen"] is None] == []
    text = (tmp_path / "gpu-smoke" / "results.md").read_text()
    for title in (
        "Numbers to reach",
        "Memory",
        "Speed",
        "Search",
        "Peers",
        "Levers one at a time: tiny, full",
    ):
        assert f"## {title}" in text

    lines = results_in(store)
    assert run.main([*SMOKE, "--out", str(tmp_path)]) == 0
    assert results_in(store) == lines, "what is done is not run again"


def test_without_a_card_it_says_so_and_nothing_is_loaded_that_could_open_one(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    loaded = "print({'peft', 'bitsandbytes', 'torchao'} & set(sys.modules))"
    code = (
        f"import sys; from benchmarks.gpu.run import main; {loaded}; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "there is no CUDA device here" in done.stderr
    assert done.stdout.strip() == "set()"
