"""Memory of the host: what the machine has, or the container this runs in, whichever is less.

A container sees the memory of the whole machine, and is killed when it takes more than the limit of its control group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# The limit, what is used, and what of that are files the kernel drops when memory is short: of version 2, and of 1.
_FILES_2 = ("memory.max", "memory.current", "inactive_file")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class HostMemory(NamedTuple):
    """Bytes in all, and those that can be had."""

    total: int
    free: int


def host_memory(groups: Path = _GROUPS, mount: Path = _MOUNT) -> HostMemory:
    """What this process may use of the host's memory."""
    machine = psutil.virtual_memory()
    known = [HostMemory(machine.total, machine.available), *_limits(groups, mount)]
    return HostMemory(min(each.total for each in known), min(each.free for each in known))


def _limits(groups: Path, mount: Path) -> Iterator[HostMemory]:
    """Of every control group that this process is in and that has a limit, from the innermost outwards."""
    for line in _read(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = mount, _FILES_2
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", _FILES_1
        else:
            continue
        inside = root / path.lstrip("/")  # in a container it need not be there: what is, is at the root
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(root) and (found := _limit(folder, *files)):
                yield found


def _limit(folder: Path, most: str, used: str, droppable: str) -> HostMemory | None:
    """None where there is no limit ("max") or it cannot be read."""
    total, taken = _read(folder / most).strip(), _read(folder / used).strip()
    if not (total.isdecimal() and taken.isdecimal()):
        return None
    counts = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    files = counts.get(droppable, "").strip()
    needed = int(taken) - (int(files) if files.isdecimal() else 0)
    return HostMemory(int(total), max(0, int(total) - max(0, needed)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):  # not every system has it, or shows it
        return ""
