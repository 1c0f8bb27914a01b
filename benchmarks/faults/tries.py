"""A try: a command or a call in a process of its own, forked from this one, which has imported everything and computed
nothing. What autofit starts with `python -c` (zygotes, agents of ranks) is forked as well: importing takes it seconds.
"""

import atexit
import dataclasses
import functools
import gc
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil

from autofit.core.forks import adopt_orphans
from benchmarks.faults import faults
from benchmarks.faults.faults import Fault
from benchmarks.faults.sandbox import Sandbox

LIMIT = 60.0  # seconds that a try may take
_GONE = 8.0  # and its processes to be gone
_PROBE, _RANK = 8.0, 8.0  # what a probe may take, and one rank may wait for another
_ROOMS = "api.doctor api.search api.train api.what_if cli export.from_result probe.measure report.run_report"
_HEAVY = tuple(f"autofit.{room}" for room in _ROOMS.split(" "))
_HEAVY += (
    "optuna.storages",
    "peft",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers.modeling_utils",
)
_NOISE = re.compile(
    r"^(Traceback \(most recent|Exception ignored|Fatal Python|.*leaked|.*\w+Warning: )",
    re.MULTILINE,
)
_CODES = (0, 2, 3, 4, 129, 130, 143)
_MOST_TOLD = 4200  # characters of a sentence and its remedy


@dataclass
class Ended:
    """How a try ended, and what it broke."""

    code: int | None  # negative: the signal; None: it was ended here, after LIMIT
    out: str
    err: str
    seconds: float
    events: list[int]
    broken: list[str] = field(default_factory=list)


class Tries:
    """Tries one after the other; each finds a folder of its own as the current one, and an empty cache."""

    def __init__(self, sandbox: Sandbox, names: Sequence[str] = _HEAVY) -> None:
        self.sandbox, self.canary = sandbox, sandbox.disk / "canary"
        self.folder = sandbox.disk / "try"
        # not on the disk that runs full
        self.printed = (sandbox.scratch / "out", sandbox.scratch / "err")
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_DATASETS_CACHE": f"{self.folder}/cache/data",
        }
        for name in names:
            importlib.import_module(name)
        adopt_orphans()
        faults.install()
        if names:
            _hurry()
        gc.collect()
        gc.freeze()

    def fresh(self, of: Path | None = None) -> Path:
        """The folder anew, with `work`, `cache` and `tmp`, or as a copy of one."""
        self.sandbox.empty()
        shutil.rmtree(self.folder, ignore_errors=True)
        if of:
            shutil.copytree(of, self.folder, symlinks=True)
        for name in ("work", "cache", "tmp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        return self.folder / "work"

    def command(
        self,
        arguments: Sequence[str],
        fault: Fault | None = None,
        strike: Any = None,
        before: Callable[[], None] = lambda: None,
    ) -> Ended:
        """Run `autofit ARGUMENTS`, `before` it something in its process, and check what every command promises."""
        main = importlib.import_module("autofit.__main__").main
        ended = self.call(lambda: (before(), main(list(arguments))), fault, strike)
        strikes_command = fault is not None and (fault.depth == 0 or fault.kind == "orphan")
        died = strikes_command and ended.code is not None and ended.code < 0
        if not died:
            codes = list(_CODES)
            if fault and fault.depth == 0 and fault.kind in faults.SIGNALS:
                codes.append(128 + faults.SIGNALS[fault.kind])  # as shells have it
            ended.broken += _spoken(ended, codes, as_json="--json" in arguments)
        return ended

    def call(
        self, function: Callable[[], Any], fault: Fault | None = None, strike: Any = None
    ) -> Ended:
        """Run a function, and check that nothing read was run, and nothing is left behind."""
        start, before = time.monotonic(), self._temporary()
        child = os.fork()
        if child == 0:
            self._run(function, fault, strike)
        code, limit = None, start + LIMIT
        struck = False
        while time.monotonic() < limit:
            done, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                time.sleep(0.2)
                os.kill(child, signal.SIGCONT)
            elif done:
                code = os.waitstatus_to_exitcode(status)
                break
            if fault and not struck and (process := faults.delayed()):
                time.sleep(fault.delay)
                struck = True
                if psutil.pid_exists(process):
                    os.kill(process, faults.SIGNALS.get(fault.kind, signal.SIGSTOP))
                if fault.kind == "orphan":
                    time.sleep(0.1)
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        ended = Ended(code, *map(_text, self.printed), time.monotonic() - start, faults.counts())
        if code is None:
            os.killpg(child, signal.SIGKILL)
            ended.broken.append(f"it went on for more than {LIMIT:.0f} s")
        ended.broken += self._left(child)
        # who is killed leaves them
        if code not in (None, -9, -11) and (names := sorted(self._temporary() - before)):
            ended.broken.append(f"temporary files are left: {', '.join(names)}")
        if self.canary.exists():
            self.canary.unlink()
            ended.broken.append("what was read was run")
        self.sandbox.empty()
        return ended

    def both(
        self, first: Sequence[str], second: Sequence[str], delay: float
    ) -> tuple[int | None, int | None]:
        """Run two commands at once, the second so many seconds later; their exit codes."""
        main = importlib.import_module("autofit.__main__").main

        def later() -> None:
            time.sleep(delay)
            main(list(second))

        children = []
        for function in (lambda: main(list(first)), later):
            child = os.fork()
            if child == 0:
                self._run(function, None, None)
            children.append(child)
        codes = tuple(self._awaited(child, 2 * LIMIT) for child in children)
        for child in children:
            self._left(child)
        return codes[0], codes[1]

    def piped(self, arguments: Sequence[str], most: int) -> tuple[int | None, str]:
        """Run a command whose reader goes after so many bytes; its exit code, and what it said beside."""
        main = importlib.import_module("autofit.__main__").main
        reader, writer = os.pipe()

        def function() -> None:
            os.dup2(writer, 1)
            os.close(writer)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
            sys.__stdout__ = sys.stdout  # type: ignore[misc]
            main(list(arguments))

        child = os.fork()
        if child == 0:
            os.close(reader)
            self._run(function, None, None)
        os.close(writer)
        if most:
            os.read(reader, most)
        os.close(reader)
        code = self._awaited(child, LIMIT)
        self._left(child)
        return code, _text(self.printed[1])

    @staticmethod
    def _awaited(child: int, seconds: float) -> int | None:
        """The exit code of a child; None where it had to be ended after so many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _run(self, function: Callable[[], Any], fault: Fault | None, strike: Any) -> NoReturn:
        """In the forked process: as Python runs a program from its start to its end."""
        os.setsid()
        for number, path in enumerate(("/dev/null", *self.printed)):
            file = os.open(
                path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
            )
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "rww"[n], closefd=False)) for n in range(3)
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ |= {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HOME": str(self.folder / "work"),
        }
        os.environ |= {"TMPDIR": str(self.folder / "tmp"), "COLUMNS": "200"}
        if fault and fault.draw % 4 == 1:  # without a home
            os.environ["XDG_CACHE_HOME"] = "/sys/none"
            del os.environ["HOME"]
        if fault and fault.draw % 4 == 2:  # as some daemons start others
            os.close(0)
        tempfile.tempdir = None
        os.chdir(self.folder / "work")
        code: Any = 0
        faults.arm(fault, strike)
        try:
            function()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def _left(self, child: int) -> list[str]:
        """The processes and the shared memory that a try left behind."""
        end, seen, broken = time.monotonic() + _GONE, {child}, list[str]()
        while found := psutil.Process().children(recursive=True):
            seen |= {each.pid for each in found}
            if time.monotonic() > end:
                living = [
                    f"{each.pid} {each.status()}"
                    for each in found
                    if each.status() != psutil.STATUS_ZOMBIE
                ]
                broken = (
                    broken or [f"processes are left: {', '.join(living)}"] if living else broken
                )
                for each in found:
                    each.kill()
            _reap()
            time.sleep(0.01)
        if names := self.sandbox.left_in_shared_memory(seen):
            broken.append(f"left in /dev/shm: {', '.join(names)}")
        return broken

    def _temporary(self) -> set[str]:
        return {each.name for each in (self.folder / "tmp").glob("*")}


class _Forked:
    """`subprocess.Popen([python, "-P", "-c", code, ...])` that runs the code in a fork of this process."""

    def __init__(
        self, arguments: Sequence[str], *, pass_fds: Sequence[int], env: Any, **given: Any
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(arguments, pass_fds, env, given)

    @staticmethod
    def _become(
        arguments: Sequence[str], pass_fds: Sequence[int], env: Any, given: Any
    ) -> NoReturn:
        code = 1
        faults.pause()
        try:
            os.setsid()
            for name, number in (("stdout", 1), ("stderr", 2)):
                if name in given:
                    os.dup2(given[name].fileno(), number)
            for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
                if number > 2 and number not in pass_fds:
                    _closed(number)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = ["-c", *arguments[4:]]
            faults.go_on()
            exec(arguments[3], {"__name__": "__main__"})
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            else:
                time.sleep(0.005)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _hurry() -> None:
    """Fork what would be started, time few steps, and wait seconds where autofit waits minutes."""
    names = (
        "core.zygote_process",
        "distributed.launcher",
        "probe.executors.local",
        "probe.executors.gang",
    )
    process, launcher, local, gangs = (importlib.import_module(f"autofit.{name}") for name in names)
    forecast, measured, devices = map(
        importlib.import_module,
        ("autofit.tuning.forecast", "autofit.tuning.measured", "autofit.training.on_devices"),
    )
    kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    for module in (process, launcher):
        module.subprocess = SimpleNamespace(Popen=_Forked, **kept)  # type: ignore[attr-defined]
    forecast.PREDICT_SECONDS = importlib.import_module("autofit.probe.executors").LOOK_SECONDS = (
        _PROBE  # type: ignore[attr-defined]
    )
    importlib.import_module("autofit.tuning.annotations").FOLLOW_SECONDS = _PROBE  # type: ignore[attr-defined]
    for name in ("EXPLORE_PLAN", "VERIFY_PLAN"):
        setattr(measured, name, dataclasses.replace(getattr(measured, name), max_seconds=0.05))
    forecast.predict_all = functools.partial(forecast.predict_all, measuring=0.1)  # type: ignore[attr-defined]
    executor, gang = measured.LocalExecutor, measured.GangExecutor
    measured.LocalExecutor = lambda logs, _: executor(logs, _PROBE)  # type: ignore[attr-defined]
    measured.GangExecutor = lambda places, logs, _: gang(places, logs, _PROBE)  # type: ignore[attr-defined]
    local._START_SECONDS = gangs.LINK_SECONDS = _PROBE  # type: ignore[attr-defined]
    local.LATE_SECONDS = gangs.LATE_SECONDS = 2.0  # type: ignore[attr-defined]
    devices.run_on_devices.__kwdefaults__["timeout"] = _RANK


def _closed(number: int) -> None:
    try:
        os.close(number)
    except OSError:
        return


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _spoken(ended: Ended, codes: Sequence[int], as_json: bool) -> list[str]:
    """What is wrong with what a command said: one sentence for an error, the right exit code, one JSON object."""
    broken = []
    if ended.code is not None and ended.code not in codes:
        broken.append(f"exit code {ended.code}")
    if noise := _NOISE.search(ended.err):
        broken.append(f"it says {ended.err[noise.start() :][-300:]!r}")
    told = [line for line in ended.err.splitlines() if line.startswith("autofit: ")]
    if ended.code in (2, 4) and not (told or as_json):
        broken.append("no sentence says what is wrong")
    broken += [f"a sentence of {len(line)} characters" for line in told if len(line) > _MOST_TOLD]
    if as_json and ended.code is not None:
        broken += [] if _is_object(ended.out) else [f"--json printed {ended.out[:100]!r}"]
    return broken


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
