"""Ranks that are started for a function: what comes back, and that one that fails ends all, with its own cause."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from autofit.core.errors import InputError, RankError
from autofit.distributed import launcher
from autofit.distributed.launcher import on_ranks
from tests import warm

TIMEOUT, PATIENCE = 1.0, 5.0  # seconds that a rank waits for another; that it may take to end all


def added(say: Callable[[Any], None], number: float) -> list[float]:
    """Two sums over ranks."""
    own = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(own)
    say(f"first {float(own)}")
    sys.stdout.write(f"{os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}\n")
    return [float(own), torch.get_num_threads()]


def test_the_answer_and_what_is_said_are_those_of_the_first(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "subprocess", subprocess)  # a process that imports for itself
    said: list[Any] = []
    answer = on_ranks(added, 3.0, count=2, device="cpu", said=said.append)
    assert answer == [7.0, max(1, len(os.sched_getaffinity(0)) // 2)]
    assert said == ["first 7.0"]
    assert capfd.readouterr().out == "0 of 2\n"


def broken(_: object, how: str, log: Path) -> None:
    """Three collectives, in the second of which something happens to rank 1."""
    (log / f"{os.getpid()}").touch()
    for number in range(3):
        if number == 1 and dist.get_rank() == 1:
            FAULTS[how]()
        dist.all_reduce(torch.ones(1))


def raises() -> None:
    raise ValueError("bad luck")


def refuses() -> None:
    raise InputError("the data ended.", "Give more.")


def exits() -> None:
    sys.stderr.write("about to exit\n")
    os._exit(3)


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "refuses": refuses,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": exits,
    "hangs": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "is out of step": lambda: dist.barrier(),
}
CAUSES = {
    "raises": r"rank 1 of 2 raised ValueError: bad luck\.",
    "refuses": r"the data ended\. Give more\.",
    "is killed": r"rank 1 of 2 was killed by SIGKILL\.",
    "exits": r"rank 1 of 2 ended with exit code 3\. The last line",
    "hangs": r"rank 1 of 2 hangs: the others waited for it in broken \(test_launcher.py:\d+\)\.",
    "is out of step": r"the ranks waited for each other: rank 0 in broken \(.*\), rank 1 in <lambda> \(.*\)\. All must",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_rank_that_fails_ends_all_with_its_own_cause(how: str, tmp_path: Path) -> None:
    with pytest.raises(InputError if how == "refuses" else RankError, match=CAUSES[how]) as raised:
        on_ranks(broken, how, tmp_path, count=2, device="cpu", timeout=TIMEOUT)
    began = min(file.stat().st_mtime for file in tmp_path.iterdir())
    waited = TIMEOUT if how in ("hangs", "is out of step") else 0.0
    assert time.time() - began < waited + PATIENCE
    assert not [file.name for file in tmp_path.iterdir() if psutil.pid_exists(int(file.name))]
    if how == "raises":
        assert 'raise ValueError("bad luck")' in raised.value.details
        assert raised.value.__notes__ == [raised.value.details]
    if how == "exits":
        assert raised.value.remedy == "The last line of its output: about to exit"


def waiting(say: Callable[[Any], None], log: Path) -> None:
    (log / f"{os.getpid()}").touch()
    dist.barrier()
    say("waits")
    time.sleep(60)


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="whoever started this ignores SIGINT"
)
def test_an_interrupt_reaches_all_and_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(_: object) -> None:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()

    with pytest.raises(KeyboardInterrupt):
        on_ranks(waiting, tmp_path, count=2, device="cpu", said=interrupt)
    assert not [file.name for file in tmp_path.iterdir() if psutil.pid_exists(int(file.name))]


@pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="whoever started this ignores SIGINT"
)
@pytest.mark.parametrize("moment", ["__enter__", "cleanup"])
def test_an_interrupt_before_or_after_leaves_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the folder of the ranks is made, and while it is deleted."""
    usual = getattr(tempfile.TemporaryDirectory, moment)

    def interrupted(folder: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return usual(folder)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile.TemporaryDirectory, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(waiting if moment == "__enter__" else added, tmp_path, count=1, device="cpu")
    assert not list(tmp_path.iterdir())


NAMES = ["rank-1.log", "store"]


def name_files_and_die(sent: int, stopping: bool) -> None:
    if stopping:
        (agent,) = psutil.Process().children()
        agent.suspend()
    names = (each.name for each in Path(tempfile.gettempdir()).glob("autofit-ranks-*/*"))
    os.write(1, " ".join(names).encode())
    os.kill(os.getpid(), sent)


@pytest.mark.parametrize(
    ("sent", "stopping", "python"),
    [
        (signal.SIGKILL, False, subprocess.Popen),
        (signal.SIGKILL, True, warm.Python),
        (signal.SIGHUP, False, warm.Python),
    ],
    ids=["killed", "killed, its agent stopped", "hung up"],
)
def test_ranks_end_with_their_caller(
    sent: signal.Signals, stopping: bool, python: type[subprocess.Popen[Any]], tmp_path: Path
) -> None:
    """And their folder, in which the job, with the user's loader and data, never is."""
    log, temporary = tmp_path / "log", tmp_path / "temporary"
    log.mkdir()
    temporary.mkdir()
    given = f"waiting, Path({str(log)!r})"
    alike = "warm.started_by('autofit.distributed.launcher')"
    code = (
        "from contextlib import nullcontext\n"
        "from tests.distributed.test_launcher import *\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup it is ignored
        f"with {'nullcontext()' if python is subprocess.Popen else alike}:\n"
        f"    on_ranks({given}, count=2, device='cpu',"
        f" said=lambda _: name_files_and_die({int(sent)}, {stopping}))"
    )
    root, environment = Path(__file__).parents[2], {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", code]
    with python(command, cwd=root, env=environment, stdout=subprocess.PIPE) as caller:
        said, _ = caller.communicate()
    assert caller.returncode == -sent
    names = {name for name in said.decode().split() if not name.startswith("torch")}
    assert sorted(names) == NAMES
    deadline = time.monotonic() + 10
    while left := [file.name for file in log.iterdir() if psutil.pid_exists(int(file.name))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    while left := [each.name for each in temporary.glob("autofit-ranks-*")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_caller_that_is_killed_while_its_agent_starts_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(
        sys, "argv", ["-c", str(theirs.fileno()), "0", str(tmp_path / "folder"), "2", "cpu", "60"]
    )
    monkeypatch.setattr(launcher, "Connection", lambda _: theirs)
    launched()
    assert not (tmp_path / "folder").exists()


def launched() -> None:
    """The process that starts ranks, in this one, which handles Ctrl-C afterwards as before."""
    before = signal.getsignal(signal.SIGINT)
    launcher.main()
    signal.signal(signal.SIGINT, before)


def test_what_ends_the_process_that_starts_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        assert tempfile.gettempdir() == "folder", "where what torch leaves of a killed process goes"
        raise MemoryError("not a byte is left")

    monkeypatch.setattr(tempfile, "tempdir", None)
    ours, theirs = multiprocessing.Pipe()
    monkeypatch.setattr(sys, "argv", ["-c", str(theirs.fileno()), "0", "folder", "2", "cpu", "60"])
    monkeypatch.setattr(launcher, "start_processes", fails)
    monkeypatch.setattr(launcher, "Connection", lambda _: theirs)
    launched()
    kind, error = ours.recv()
    assert kind == "failed"
    assert str(error) == "the process that starts ranks failed: MemoryError: not a byte is left."
    assert "Traceback" in error.details


def test_what_cannot_be_sent_is_told() -> None:
    with pytest.raises(InputError, match="this cannot be sent to other processes: TypeError"):
        on_ranks(added, threading.Lock(), count=2, device="cpu")
