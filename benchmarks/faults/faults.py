"""Faults: what happens to which process of a try, and at which moment.

A moment is the number of what the process has asked the system for (Python's audit events: opening, renaming, sockets,
SQLite) and of what it has computed (modules forward and backward, optimizer steps), so that the same fault strikes at
the same place again; `delay` seconds later where it should strike between two of them. Processes are told apart by how
deep they were forked: the command, what it starts (a zygote, an agent), and what that forks (a probe, a rank).
"""

import importlib
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segfault": signal.SIGSEGV,
    "end": signal.SIGTERM,
}
SIGNALS["hang up"] = signal.SIGHUP
# "orphan": what the command started is stopped, and the command is killed.
IN_PROCESS = (*SIGNALS, "orphan", "interrupt", "hang", "host memory", "device memory")
AROUND = ("disk full", "clock back", "deleted", "flipped")  # strikes what all processes share
_COUNTED = {"open", "os", "shutil", "socket", "tempfile", "fcntl", "sqlite3", "pickle", "glob"}
_DEPTHS, _DAY = 6, 86400.0
# Events by depth; the process that a delayed fault is to strike; whether the fault was there.
_shared = mmap.mmap(-1, 8 * (_DEPTHS + 2))
_DELAYED, _THERE = 8 * _DEPTHS, 8 * (_DEPTHS + 1)


@dataclass(frozen=True)
class Fault:
    """What strikes, how deep, and when; `draw` decides the rest: which bits, which folder."""

    kind: str
    depth: int
    event: int
    delay: float = 0.0
    draw: int = 0

    @property
    def is_signal(self) -> bool:
        return self.kind in SIGNALS

    def __str__(self) -> str:
        return ", ".join(map(str, vars(self).values()))

    @classmethod
    def read(cls, text: str) -> "Fault":
        """The inverse of `str`."""
        kind, depth, event, delay, draw = text.split(", ")
        return cls(kind, int(depth), int(event), float(delay), int(draw))


@dataclass
class _Armed:
    fault: Fault | None = None
    strike: Callable[[], None] | None = None  # of what all share
    depth: int = 0


_armed: _Armed | None = None
_depth, _paused = 0, False


def arm(fault: Fault | None, around: Callable[[], None]) -> None:
    """Count the events of this process and of those that it forks, and strike one of them."""
    global _armed, _depth
    _shared[:] = bytes(len(_shared))
    _armed, _depth = _Armed(fault, around), 0


def pause() -> None:
    """Count nothing until `go_on`, in this process."""
    global _paused
    _paused = True


def go_on() -> None:
    """Count again."""
    global _paused
    _paused = False


def counts() -> list[int]:
    """How many events there were, by depth."""
    return list(struct.unpack(f"{_DEPTHS}q", _shared[: 8 * _DEPTHS]))


def delayed() -> int:
    """The process that the fault is to strike after its delay; 0: none yet."""
    return int(struct.unpack_from("q", _shared, _DELAYED)[0])


def there() -> bool:
    """Whether the fault's moment came."""
    return bool(struct.unpack_from("q", _shared, _THERE)[0])


def flip(path: Path, draw: int) -> None:
    """Damage a file: bits, its first bytes, a span of zeros, its end, or a span that comes twice."""
    rng, data = random.Random(draw), bytearray(path.read_bytes())
    kind = (
        rng.choice(("bits", "bits", "bits", "first", "zeros", "end", "twice")) if data else "bits"
    )
    at = rng.randrange(len(data)) if data else 0
    if kind == "first":  # by which readers tell what a file is
        data[rng.randrange(min(16, len(data)))] ^= 1 << rng.randrange(8)
    elif kind == "bits":
        for _ in range(rng.choice((1, 1, 3, 20)) if data else 0):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zeros":
        data[at : at + 512] = bytes(min(512, len(data) - at))
    elif kind == "end":
        del data[at:]
    else:
        data[at:at] = data[at : at + 512]
    path.write_bytes(data)


def clock_back() -> None:
    """Have this process see yesterday, as after the clock was set."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() - _DAY
    time.time_ns = lambda: nanoseconds() - int(_DAY * 1e9)


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _strike(armed: _Armed) -> None:
    fault = armed.fault
    assert fault
    if fault.kind == "orphan" or (fault.is_signal and fault.delay):
        struct.pack_into("q", _shared, _DELAYED, os.getpid())
    elif fault.is_signal:
        os.kill(os.getpid(), SIGNALS[fault.kind])
    elif fault.kind == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif fault.kind == "hang":
        while True:
            time.sleep(60)
    elif fault.kind == "host memory":
        raise MemoryError("not a byte is left")
    elif fault.kind == "device memory":
        raise sys.modules["torch"].OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB."
        )
    elif armed.strike:
        armed.strike()


def _hook(event: str, _: Any) -> None:
    if event.partition(".")[0] in _COUNTED:
        _happened(in_step=False)


def _happened(*, in_step: bool = True) -> None:
    global _armed
    if _armed is None or _paused:
        return
    armed, place = _armed, 8 * min(_depth, _DEPTHS - 1)
    number = struct.unpack_from("q", _shared, place)[0]
    struct.pack_into("q", _shared, place, number + 1)
    fault = armed.fault
    if fault and fault.depth == _depth and fault.event <= number and not there():
        if fault.kind == "device memory" and not in_step:
            return
        _armed = None
        struct.pack_into("q", _shared, _THERE, 1)
        try:
            _strike(armed)
        finally:
            _armed = _Armed()


def _computed(*_: Any) -> None:
    _happened()


def _forward_ended(_: Any, __: Any, output: Any) -> None:
    _happened()
    if type(output) is sys.modules["torch"].Tensor and output.requires_grad:
        output.register_hook(_computed)


def _deeper() -> None:
    global _depth
    _depth += 1


def install() -> None:
    """Once for a process and all that it forks."""
    sys.addaudithook(_hook)
    os.register_at_fork(after_in_child=_deeper)
    if "torch" in sys.modules:
        modules = importlib.import_module("torch.nn.modules.module")
        optimizers = importlib.import_module("torch.optim.optimizer")
        modules.register_module_forward_pre_hook(_computed)
        modules.register_module_forward_hook(_forward_ended)
        optimizers.register_optimizer_step_pre_hook(_computed)
        optimizers.register_optimizer_step_post_hook(_computed)
