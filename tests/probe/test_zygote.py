"""Whoever dies, however it dies, nobody is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofit import techniques
from autofit.core import zygote_process
from autofit.core.budget import Budget
from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB
from autofit.core.workload import Workload
from autofit.core.zygote_process import started_early
from autofit.probe import LocalExecutor, Plan, Request, zygote
from autofit.probe.executors import local
from tests import tiny, warm
from tests.processes import alive, descendants, number_in, wait_until, wait_until_gone


@pytest.fixture(autouse=True)
def new_zygotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zygotes are new processes of Python, as users' are."""
    monkeypatch.setattr(zygote_process, "subprocess", subprocess)


SCRIPT = """
import os
import subprocess
import sys
import time
from pathlib import Path

from tests import tiny
from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.workload import Workload
from autofit.probe import LocalExecutor, Plan, Request
from autofit.probe.executors import local
from tests.probe.bare import FIRST

folder = Path(sys.argv[1])
with (folder / "main_ran").open("a") as file:
    file.write("once\\n")

def loss(model, batch):
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "grandchild").write_text(f"{grandchild.pid}\\n")
    (folder / "child").write_text(f"{os.getpid()}\\n")
    time.sleep(600)

plain = tiny.mlp_workload()
workload = Workload(model=plain.model, batch=plain.batch, loss=loss)
local.START = FIRST + local.START
with LocalExecutor(folder) as executor:
    config = techniques.canonicalize({}, workload, tiny.CPU)
    executor.measure(workload, Request(config, tiny.CPU, Budget(2**30, 2**30), Plan()), number=0)
"""


def shared_memory_of(processes: list[int]) -> list[str]:
    """What the processes left in shared memory: torch puts its maker's number in each name."""
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return [
        name for name in names if {str(process) for process in processes} & set(name.split("_"))
    ]


@pytest.mark.parametrize("how", ["parent", "parent and zygote", "stopped zygote"])
def test_a_parent_that_is_killed_takes_all_along(tmp_path: Path, how: str) -> None:
    """Or the parent and the zygote at once, as a system that stops a job does; also a zygote that
    somebody stopped."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [str(tmp_path / "script.py"), str(tmp_path)]
    if how == "parent":  # its zygote is a new process
        parent = warm.Python([sys.executable, *command], env=environment)
    else:
        parent = warm.python(command, env=environment)
    child, grandchild = number_in(tmp_path / "child"), number_in(tmp_path / "grandchild")
    family = descendants(parent.pid)
    assert {child, grandchild} < set(family)
    assert len(family) == 3  # and the zygote
    if how == "parent and zygote":
        os.kill(family[0], signal.SIGTERM)
        os.kill(parent.pid, signal.SIGTERM)
    else:
        if how == "stopped zygote":
            os.kill(family[0], signal.SIGSTOP)
        os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_gone(family)
    assert not shared_memory_of([parent.pid, *family])
    assert (tmp_path / "main_ran").read_text() == "once\n"


def test_a_zygote_that_is_killed_takes_its_child_along_and_the_parent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "types.py").write_text(
        "raise SystemExit('what lies in the current directory was imported')"
    )
    monkeypatch.chdir(elsewhere)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (tmp_path / "child").write_text(f"{os.getpid()}\n")
        time.sleep(600)
        return tiny.classify(model, batch)

    plain = tiny.mlp_workload()
    workload = Workload(model=plain.model, batch=plain.batch, loss=loss)
    config = techniques.canonicalize({}, workload, tiny.CPU)
    killed: list[int] = []

    def kill_in_mid_probe(zygote: int) -> None:
        killed.append(number_in(tmp_path / "child"))
        os.kill(zygote, signal.SIGKILL)

    (tmp_path / "zygote.log").write_text("the last words of another zygote\n")
    with LocalExecutor(tmp_path) as executor:
        killer = threading.Thread(target=kill_in_mid_probe, args=(executor._process.pid,))
        killer.start()
        with pytest.raises(
            ProbeError, match="the process that starts probes ended: killed by SIGKILL"
        ) as caught:
            executor.measure(
                workload, Request(config, tiny.CPU, Budget(GIB, GIB), Plan()), number=0
            )
        killer.join()
        assert caught.value.remedy == ""
        wait_until_gone(killed)
        with pytest.raises(ProbeError):
            executor.detect("cpu")
    executor.close()  # twice does no harm


def test_leaving_early_ends_a_zygote_that_is_not_ready_yet() -> None:
    with LocalExecutor() as executor:
        assert alive(executor._process.pid)
    assert not alive(executor._process.pid)


IMPORTING = """
import sys
import time
from pathlib import Path

from autofit.probe import LocalExecutor

sys.path.insert(0, sys.argv[1])  # where torch takes for ever to be imported
with LocalExecutor() as executor:
    Path(sys.argv[1], "zygote").write_text(f"{executor._process.pid}\\n")
    time.sleep(600)
"""


def test_a_parent_that_is_killed_takes_along_a_zygote_that_still_imports(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import time\nfrom pathlib import Path\nPath(__file__).with_name('imports').touch()\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = warm.Python([sys.executable, "-c", IMPORTING, str(tmp_path)], env=environment)
    zygote = number_in(tmp_path / "zygote")
    wait_until((tmp_path / "imports").exists, "the zygote imports")
    parent.kill()
    parent.wait()
    wait_until_gone([zygote])


STANDING_IN = """
import os, signal, sys, time
from multiprocessing.connection import Connection
parent = Connection(int(sys.argv[1]))
parent.send(None)
parent.recv_bytes()
"""


@pytest.mark.parametrize(
    ("end", "message", "remedy"),
    [
        ("print('noise'); os._exit(0)", "ended: exit code 0.", ""),
        (
            "print('noise', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "ended: killed by SIGSEGV.",
            "",
        ),
        (
            "raise SystemExit('its last words')",
            "ended: exit code 1.",
            "The last line of its log: its last words",
        ),
        ("sys.exit(3)", "ended: exit code 3.", ""),
        ("time.sleep(600)", "does not answer.", ""),
    ],
    ids=["exits", "killed", "raises", "says nothing", "hangs"],
)
def test_of_a_zygote_that_ends_nothing_is_told_but_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, message: str, remedy: str
) -> None:
    monkeypatch.setattr(local, "START", STANDING_IN + end)
    monkeypatch.setattr(local, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(local, "_END_SECONDS", 0.5)
    (tmp_path / "zygote.log").write_text("the last words of another zygote\n")
    with LocalExecutor(tmp_path) as executor:
        with pytest.raises(ProbeError) as caught:
            executor.run(tiny.mlp_workload, None, log="it.log", timeout=2.0)
        assert (caught.value.message, caught.value.remedy) == (
            f"the process that starts probes {message}",
            remedy,
        )
        with pytest.raises(ProbeError):  # and no answer that comes late is the next caller's
            executor.run(tiny.mlp_workload, None, log="it.log", timeout=2.0)


def test_a_zygote_that_was_started_early_serves_the_first_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_process, "START", STANDING_IN + "raise SystemExit('its last words')")
    with started_early(), LocalExecutor(tmp_path) as executor, pytest.raises(ProbeError) as caught:
        executor.run(tiny.mlp_workload, None, log="it.log", timeout=2.0)
    assert caught.value.remedy == "The last line of its log: its last words"
    assert (tmp_path / "zygote.log").read_text() == "its last words\n"


@pytest.mark.parametrize("used", [True, False], ids=["a model of transformers", "a plain model"])
def test_what_one_started_early_left_out_it_imports_for_a_model_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    monkeypatch.setattr(local, "TRANSFORMERS", ("wave", "fileinput"))
    others = {
        name: module
        for name, module in sys.modules.items()
        if name != "transformers.modeling_utils"
    }
    monkeypatch.setattr(
        sys, "modules", others | ({"transformers.modeling_utils": sys} if used else {})
    )
    with started_early(("fileinput",)):
        (early,) = zygote_process._early
        with LocalExecutor() as executor:
            assert executor._process is early.process
            imported = executor.run(
                lambda _: {"fileinput", "wave"} & set(__import__("sys").modules),
                None,
                log="it.log",
                timeout=60.0,
            )
    assert imported == ({"fileinput", "wave"} if used else {"fileinput"})


def test_one_started_early_serves_nobody_whose_own_code_set_a_variable_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zygote_process, "START", STANDING_IN + "import time; time.sleep(60)")
    with started_early():
        early = zygote_process._early[0]
        monkeypatch.setenv("HF_HOME", "/elsewhere")
        assert zygote_process.taken(zygote_process.environment_of_zygote()) is None
        monkeypatch.delenv("HF_HOME")
        assert zygote_process.taken(zygote_process.environment_of_zygote()) is early
    early.process.kill()
    early.process.wait()
    early.close()


def test_a_zygote_that_cannot_start_is_a_probe_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    with LocalExecutor() as executor, pytest.raises(ProbeError, match="did not start") as caught:
        executor.detect("cpu")
    assert "this torch is broken" in caught.value.remedy


def test_an_answer_that_arrives_while_its_child_is_found_dead_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The byte of an earlier SIGCHLD wakes the zygote, and the child answers and ends before it is looked for."""
    (reader, writer), (told, teller), (parent, other) = os.pipe(), os.pipe(), os.pipe()
    monkeypatch.setattr(os, "waitid", lambda *_: os.write(writer, b"the answer"))
    os.write(teller, b"\0")
    connection: Any = SimpleNamespace(fileno=lambda: parent)
    try:
        answer = zygote._collect(reader, 0, told, connection, time.monotonic() + 60, Path())
    finally:
        for each in (reader, writer, told, teller, parent, other):
            os.close(each)
    assert answer == b"the answer"


def test_a_model_that_prints_without_end_does_not_fill_the_disk(executor: LocalExecutor) -> None:
    def printing(_: Workload | None) -> int:
        """Prints until what is too much is taken away, 250 MiB at most; returns how much it was."""
        printed = 0
        while os.fstat(1).st_size >= printed and printed < 250 * 2**20:
            printed += os.write(1, b"x" * 2**16)
            time.sleep(0.005)
        sys.stdout.write("the last words\n")
        return printed

    printed = executor.run(printing, None, log="printing.log", timeout=120.0)
    log = executor.logs / "printing.log"
    assert log.stat().st_size < printed
    assert log.read_bytes()[:10] == b"x" * 10
    assert b"the last words" in log.read_bytes()[-1000:]
