"""Memory of the host: the machine's, or the container's, whichever is less.

A container sees the memory of the whole machine, and is killed when it takes more than the limit of its control group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of cgroups version 2 and 1: the limit, what is used, and the part of that which the kernel drops when memory is short.
_FILES_2 = ("memory.max", "memory.current", "inactive_file")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class HostMemory(NamedTuple):
    """Bytes in all, and those available."""

    total: int
    free: int


def host_memory(groups: Path = _GROUPS, mount: Path = _MOUNT) -> HostMemory:
    """The host memory that this process may use."""
    machine = psutil.virtual_memory()
    limits = [HostMemory(machine.total, machine.available), *_limits(groups, mount)]
    return HostMemory(min(each.total for each in limits), min(each.free for each in limits))


def _limits(groups: Path, mount: Path) -> Iterator[HostMemory]:
    """The limits of this process's control groups, from the innermost outwards."""
    for line in _read(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = mount, _FILES_2
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", _FILES_1
        else:
            continue
        inside = root / path.lstrip("/")  # absent in some containers, whose limit is then at the root
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(root) and (limit := _limit(folder, *files)):
                yield limit


def _limit(folder: Path, limit: str, used: str, droppable: str) -> HostMemory | None:
    """None where there is no limit ("max") or it cannot be read."""
    total, taken = _read(folder / limit).strip(), _read(folder / used).strip()
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
