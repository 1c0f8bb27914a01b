"""A search that is killed, resumed, interrupted and resumed again: nothing is lost, measured twice or left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autofit.cli import main
from tests import warm
from tests.processes import descendants, number_in, wait_until_gone

# Its loss tells in `started` of every process that really computes it, and hangs in the one whose turn `hang` names, in
# turn 0 where it is only predicted. What it starts then is in a session of its own.
WORKLOAD = """
import os
import subprocess
import time
from pathlib import Path

from tests import tiny
from autofit import Workload

FOLDER = Path({folder!r})
STARTED = FOLDER / "started"  # a list in memory would be put back between the calls of one proof

def is_told():
    return STARTED.exists() and str(os.getpid()) in STARTED.read_text().split()

def hang_in(turn):
    if (FOLDER / "hang").exists() and turn == int((FOLDER / "hang").read_text()):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        (FOLDER / "hanging").write_text(f"{{os.getpid()}}\\n")
        time.sleep(600)

def loss(model, batch):
    if type(batch[0]).__name__ == "FakeTensor":
        hang_in(0)
    float(next(model.parameters()).sum())  # which nothing can be predicted of: such a search goes on to its last trial
    if not is_told():
        with STARTED.open("a") as file:
            file.write(f"{{os.getpid()}}\\n")
        hang_in(len(STARTED.read_text().split()))
    return tiny.classify(model, batch)

def make():
    plain = tiny.mlp_workload(8)
    return Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=8)
"""
SETTINGS = ("precision=fp32", "optimizer=adamw", "attention=sdpa", "micro_batch_size=1,2,4,8")
TRIALS = 5


class Searches:
    """One search after the other in the same run directory, those that are ended early in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(WORKLOAD.format(folder=str(folder)))

    @property
    def arguments(self) -> list[str]:
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        return [
            *(
                "search",
                "--model",
                str(self.folder / "mine.py:make"),
                "--device",
                "cpu",
                "--mem",
                "1",
            ),
            *("--trials", str(TRIALS), "--out", str(self.folder / "run"), "--json", *settings),
        ]

    def start(self, *more: str, hang: int) -> subprocess.Popen[str]:
        (self.folder / "hanging").unlink(missing_ok=True)
        (self.folder / "hang").write_text(str(hang))
        return warm.python(
            ["-m", "autofit", *self.arguments, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # a process group of its own, as a terminal gives every command
        )

    def finish(self, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
        """Go on in this process to the end; what it said."""
        (self.folder / "hang").unlink()
        with pytest.raises(SystemExit) as ended:
            main([*self.arguments, "--resume"])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return out, err

    def family_of_hanging(self, search: subprocess.Popen[str]) -> list[int]:
        """The zygote, its children and what those started, while one of them hangs."""
        child = number_in(self.folder / "hanging")
        family = descendants(search.pid)
        assert child in family
        assert len(family) >= 3
        return family

    @property
    def started(self) -> int:
        return len((self.folder / "started").read_text().split())


def left_in_shared_memory(processes: list[int]) -> list[str]:
    """What these processes left there: torch puts its maker's number in each name."""
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [name for name in names if {str(each) for each in processes} & set(name.split("_"))]


@pytest.mark.usefixtures("shared_zygote")
def test_nothing_is_lost_or_measured_twice_or_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searches = Searches(tmp_path)

    # The parent is ended while it predicts, as a cluster ends a job.
    search = searches.start(hang=0)
    family = searches.family_of_hanging(search)
    search.terminate()
    _, err = search.communicate()
    assert search.returncode == 128 + signal.SIGTERM
    assert err.endswith("autofit: interrupted.\n"), "there is nothing yet to go on with"
    wait_until_gone(family)
    (tmp_path / "started").unlink()

    # The parent is killed in its third probe; a look came before the first.
    search = searches.start(hang=4)
    family = searches.family_of_hanging(search)
    search.kill()
    out, _ = search.communicate()
    assert out == ""
    wait_until_gone(family)
    assert searches.started == 4

    # Resumed, and Ctrl-C pressed in the fourth probe: the third was measured again, the first two were not.
    search = searches.start("--resume", hang=7)
    family = searches.family_of_hanging(search)
    os.killpg(search.pid, signal.SIGINT)
    out, err = search.communicate()
    assert search.returncode == 130
    assert "interrupted; go on with --resume" in err
    assert "Traceback" not in err
    wait_until_gone(family)
    assert not left_in_shared_memory([search.pid, *family])
    interrupted: dict[str, Any] = json.loads(out)
    assert interrupted["stopped_by"] == "interrupt"
    assert [trial["number"] for trial in interrupted["trials"]] == [0, 1, 2]
    assert "probe 1 of" not in err
    assert "probe 3 of" in err
    assert searches.started == 7

    # Resumed once more, to the end: a look, two probes, and three that verify or more: the slower one may run once.
    out, err = searches.finish(capsys)
    finished = json.loads(out)
    assert finished["trials"][:3] == interrupted["trials"]
    assert len(finished["trials"]) == TRIALS
    configs = [json.dumps(trial["config"], sort_keys=True) for trial in finished["trials"]]
    assert len(set(configs)) == TRIALS
    assert finished["best"]["measured"]["verified"] is True
    verifying = err.count("verifying")
    assert searches.started == 7 + 1 + 2 + verifying
    assert verifying >= 3
