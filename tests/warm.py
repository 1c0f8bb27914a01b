"""Python processes that have imported what the tests import: forks of this process as it was before its first test.

A new Python takes three to six seconds to import torch and transformers, and a run of the tests starts dozens. What is
forked here has computed nothing, has one thread, and no handler, open file or warning of pytest's. It is a child of
this process like any other: signals, exit codes and groups are those of a process that was started anew. Tests of what
a new process imports, and of how it starts, start a real one; so do all where there is a card, which survives no fork.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import logging
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

ON_A_CARD = Path("/dev/nvidia0").exists()
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_START, _IMPORT = b"s", b"i"
# What training imports, which each process would for itself.
_OF_TRAINING = (
    "tests.mappings",
    "autofit.training.session",
    "torch.distributed.fsdp",
    "peft",
    "bitsandbytes",
    "torchao.optim",
)
_turn = threading.Lock()
_nursery: socket.socket | None = None  # None: in what was forked here, which forks by itself
_imported: set[str] = set()  # there, beside what was imported before it was forked


@dataclass(frozen=True)
class Call:
    """A process that is asked for. `arguments`: a command of Python's, or a function and what it is called with;
    `files`: the numbers of the files that are given to it."""

    arguments: Sequence[Any]
    environment: dict[str, str]
    folder: str
    processors: set[int]
    parent: int
    files: Sequence[int]
    own_session: bool


class Warm(subprocess.Popen[Any]):
    """A process as `subprocess.Popen` starts it, of `[sys.executable, ...]` or of `[function, *arguments]`."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        pass_fds, cwd, env = given[3:6]
        stdin, _, _, stdout, _, stderr = pipes = given[9:15]
        start_new_session = given[20]

        streams = {0: stdin, 1: stdout, 2: stderr}
        files = {number: number if file == -1 else file for number, file in streams.items()}
        files |= {file: file for file in pass_fds}
        call = Call(
            list(args),
            dict(os.environ if env is None else env),
            str(Path(cwd or ".").absolute()),
            os.sched_getaffinity(0),
            os.getpid(),
            list(files),
            start_new_session,
        )
        if _nursery is not None and "torch" in sys.modules:
            import_there(_OF_TRAINING)
        self.pid = _ask(call, list(files.values()))
        self._child_created = True
        self._close_pipe_fds(*pipes)


# What starts a process of Python that need not be a new one.
Python: type[subprocess.Popen[Any]] = subprocess.Popen if ON_A_CARD else Warm


@contextlib.contextmanager
def zygotes() -> Iterator[None]:
    """Inside, executors start warm zygotes."""
    with started_by("autofit.core.zygote_process"):
        yield


@contextlib.contextmanager
def started_by(module: str) -> Iterator[None]:
    """Inside, the Pythons that a module starts are warm ones."""
    names = {name: getattr(subprocess, name) for name in subprocess.__all__} | {"Popen": Python}
    with mock.patch(f"{module}.subprocess", SimpleNamespace(**names)):
        yield


def python(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Python with these words on its command line, whose own executors start warm zygotes."""
    if ON_A_CARD:
        return subprocess.Popen([sys.executable, *words], **options)
    return Warm([_command, *words], **options)


def _command(*words: str) -> None:
    with zygotes():
        _run([sys.executable, *words])


# What a shell script takes for Python: it has the tests' process start it, with its files, and waits for the end.
_CLIENT = """\
#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as tests:
    tests.connect({path!r})
    socket.send_fds(tests, [b"."], [0, 1, 2])
    asked = {{"words": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
    tests.sendall(json.dumps(asked).encode() + b"\\n")
    sys.exit(int(tests.recv(16) or b"1") & 0xFF)
"""


@contextlib.contextmanager
def python_for_scripts(folder: Path) -> Iterator[str]:
    """The path of a program that is run as Python is, and starts a warm one."""
    if ON_A_CARD:
        yield sys.executable
        return
    program, path = folder / "python", str(folder / "socket")
    program.write_text(_CLIENT.format(python=sys.executable, path=path))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        accepting = threading.Thread(target=_accept, args=(listening,), daemon=True)
        accepting.start()
        yield str(program)
        listening.shutdown(socket.SHUT_RDWR)  # which wakes who waits there
    accepting.join()


def _accept(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=_start_for, args=listening.accept()[:1], daemon=True).start()


def _start_for(script: socket.socket) -> None:
    with script:
        _, files, _, _ = socket.recv_fds(script, 1, 3)
        with script.makefile("rb") as lines:
            asked = json.loads(lines.readline())
        words = asked.pop("words")
        process = python(words, stdin=files[0], stdout=files[1], stderr=files[2], **asked)
        for file in files:
            os.close(file)
        threading.Thread(target=_end_with, args=(script, process), daemon=True).start()
        with contextlib.suppress(OSError):  # it was killed
            script.sendall(str(process.wait()).encode())


def _end_with(script: socket.socket, process: subprocess.Popen[Any]) -> None:
    """End a process when what stands for it is killed."""
    with contextlib.suppress(OSError):
        script.recv(1)
    if process.returncode is None:
        process.kill()


@contextlib.contextmanager
def nursery() -> Iterator[None]:
    """Inside, processes are forked from one that is forked now."""
    global _nursery
    _nursery, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        _serve(theirs)
    theirs.close()
    try:
        yield
    finally:
        _nursery.close()
        os.waitpid(process, 0)


def import_there(names: Sequence[str]) -> None:
    """Have modules imported that processes would import for themselves otherwise."""
    if _nursery is None:
        _import(names)
        return
    missing = [name for name in names if name not in _imported]
    if not missing:
        return
    with _turn:
        _send(_IMPORT, missing, [])
        _nursery.recv(1)
    _imported.update(missing)


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _send(kind: bytes, message: object, files: Sequence[int]) -> None:
    """A message of any size, and files."""
    assert _nursery is not None
    with os.fdopen(os.memfd_create("message"), "wb") as memory:
        pickle.dump(message, memory)
        memory.flush()
        socket.send_fds(_nursery, [kind], [memory.fileno(), *files])


def _ask(call: Call, files: Sequence[int]) -> int:
    """The number of a process that was started."""
    if _nursery is None:
        child = os.fork()
        if child == 0:
            _become(call, files)
        return child

    with _turn:
        # What is forked twice becomes a child of the next ancestor that adopts.
        ctypes.CDLL(None).prctl(_ADOPT, 1)
        try:
            _send(_START, call, files)
            answer = b""
            while len(answer) < 9:
                part = _nursery.recv(9)
                assert part, "the process that forks has ended"
                answer += part
        finally:
            ctypes.CDLL(None).prctl(_ADOPT, 0)
    return int.from_bytes(answer[:8], "big")


def _serve(asked: socket.socket) -> NoReturn:
    """Fork a process for each call, to the end of this one's parent."""
    global _nursery
    _nursery = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    _close_all_but([0, 1, 2, asked.fileno()])
    gc.disable()  # imports take a fifth longer with it
    while True:
        kind, files, _, _ = socket.recv_fds(asked, 1, 64)
        if not kind:
            os._exit(0)
        with os.fdopen(files.pop(0), "rb") as memory:
            memory.seek(0)
            message = pickle.load(memory) if kind == _IMPORT else memory.read()

        if kind == _IMPORT:
            _import(message)
            gc.freeze()
            asked.send(b".")
            continue

        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                _become(pickle.loads(message), files)
            asked.send(child.to_bytes(8, "big"))
            os._exit(0)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        asked.send(b".")


def _become(call: Call, files: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, to its end."""
    code: Any = 1
    try:
        while os.getppid() != call.parent:  # what stands between has not ended yet
            time.sleep(0.001)
        _enter(call, files)
        _run(call.arguments)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _enter(call: Call, files: Sequence[int]) -> None:
    """Take what a new process is given, and leave what belongs to pytest."""
    global _nursery
    _nursery = None
    if call.own_session:
        os.setsid()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
    for number, file in zip(call.files, moved, strict=True):
        os.dup2(file, number)
    _close_all_but(call.files)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = os.fdopen(
            number,
            "w" if number else "r",
            1 if number == 2 else -1,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            closefd=False,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)

    os.environ.clear()
    os.environ.update(call.environment)
    os.chdir(call.folder)
    os.sched_setaffinity(0, call.processors)
    tempfile.tempdir = None
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    gc.enable()


def _run(arguments: Sequence[Any]) -> None:
    first, *words = arguments
    if callable(first):
        first(*words)
        return

    assert first == sys.executable
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = paths
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):  # how the interpreter starts
        del words[0]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def _end(code: int) -> NoReturn:
    """End as Python does."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _close_all_but(files: Sequence[int]) -> None:
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in files:
            with contextlib.suppress(OSError):  # of the list itself
                os.close(int(path.name))
