"""What this machine offers. Asks the CUDA driver, so it runs in a child process: the parent never
opens the device."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from autofit.core.errors import NoDeviceError, ProbeError
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.hardware.dispatch import dispatch_seconds
from autofit.hardware.host_link import host_link
from autofit.hardware.out_of_memory import is_device_out_of_memory
from autofit.hardware.segments import open_card

END_OTHERS = (
    "End the other processes there (see nvidia-smi) and continue with --resume, or search with less "
    "memory."
)
_IDLE = 64 * MIB  # of a card that nobody uses: what its driver holds for itself
_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")

# Of cgroups version 2 and 1: the limit, what is used, and the part of that which the kernel drops
# when memory is short.
_FILES_2 = ("memory.max", "memory.current", "inactive_file")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def detect(device: str | None = None) -> Hardware:
    """The facts of a device.

    Args:
        device: "cuda" or "cpu"; None: CUDA card 0 where there is one, else the CPU.

    Raises:
        NoDeviceError: CUDA was asked for and is absent; ProbeError: it cannot be used, or the card
        is one of AMD's, which PyTorch calls CUDA as well.
    """
    if device == "cpu":
        return _cpu()

    if torch.version.hip is not None:
        message = "this PyTorch is built for AMD's cards (ROCm), which autofit does not support."
        remedy = (
            "Search for the CPU with --device cpu --mem GIB, or "
            "predict for a card with autofit estimate --gpu NAME."
        )
        raise ProbeError(message, remedy)
    if torch.cuda.is_available():
        return _cuda()
    if device == "cuda":
        message = "there is no CUDA device here, so nothing can run on a GPU."
        remedy = (
            "Run on a machine with the card, or search for the CPU with --device cpu --mem GIB."
        )
        raise NoDeviceError(message, remedy)
    return _cpu()


def usual_kind() -> str:
    """The kind of device that is used where none is named: "cuda" where there is a card."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cpu() -> Hardware:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = host_memory()
    return Hardware(
        device="cpu",
        name=models[0] if models else platform.machine(),
        memory_bytes=memory.total,
        host_memory_bytes=memory.total,
        host_free_bytes=memory.free,
        cores=len(os.sched_getaffinity(0)),
    )


def _cuda() -> Hardware:
    before = used_bytes_without_context()
    with opening():
        allocator = open_card()
        free, total = torch.cuda.mem_get_info(0)

    properties = torch.cuda.get_device_properties(0)
    used = total - free - torch.cuda.memory_reserved(0)
    others = min(before, used)
    host = _cpu()
    return replace(
        host,
        device="cuda",
        name=properties.name,
        memory_bytes=total,
        capability=(properties.major, properties.minor),
        context_bytes=used - others,
        used_bytes=others if others > _IDLE else 0,
        dispatch_seconds=dispatch_seconds(host.name),
        host_link=host_link(f"{host.name}, {properties.name}"),
        allocator=allocator,
    )


@contextmanager
def opening() -> Iterator[None]:
    """Wraps the first use of card 0. Raises ProbeError where it cannot be used, as when it is
    full."""
    try:
        yield
    except RuntimeError as error:
        if not is_device_out_of_memory(error):
            reason = str(error).strip().splitlines()[0]
            raise ProbeError(f"the card cannot be used: {reason}.") from error

        used = used_bytes_without_context()
        held = f": {used / GIB:.1f} GiB are in use" if used else ""
        message = f"the card is full before autofit has taken any of it{held}."
        raise ProbeError(message, END_OTHERS) from error


def visible_cards() -> tuple[str, ...]:
    """The names of the visible cards in CUDA_VISIBLE_DEVICES, card 0 first; opens none.

    CUDA shows a process one instance of a card (MIG) only, so all that are named there count.
    """
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if named[0].startswith("MIG-"):
        return tuple(filter(None, named))

    count = torch.cuda.device_count()
    if named[0]:
        return tuple(named[:count])
    return tuple(map(str, range(count)))


def used_bytes_without_context() -> int:
    """Memory that other processes hold on card 0, from nvidia-smi, which opens no context; 0 where
    it does not say.

    By the card's UUID, because CUDA and nvidia-smi number cards differently. Nobody else holds
    memory of an instance of a card (MIG), and nvidia-smi reports whole cards.
    """
    used = _used_by_card()
    if not used:
        return 0

    try:
        # After nvidia-smi, because CUDA takes memory of the card.
        properties = torch.cuda.get_device_properties(0)
    except RuntimeError:  # the next use of the card raises it again, and says more
        return 0
    if " MIG " in properties.name:
        return 0
    return used.get(f"GPU-{properties.uuid}", 0)


def _used_by_card() -> dict[str, int]:
    """Bytes in use by the UUID of each card, as nvidia-smi says; nothing where it says none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    query = [command, "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs is not reported here
        return {}
    if answer.returncode:
        return {}

    used = {}
    for line in answer.stdout.splitlines():
        card, _, mib = line.partition(",")
        if mib.strip().isdigit():
            used[card.strip()] = int(mib) * MIB
    return used


class HostMemory(NamedTuple):
    """Bytes in all, and those available."""

    total: int
    free: int


def host_memory(groups: Path = _GROUPS, mount: Path = _MOUNT) -> HostMemory:
    """The memory that this process may use: the machine's, or its container's, whichever is less.

    A container sees the memory of the whole machine, and is killed when it takes more than the
    limit of its control group.
    """
    machine = psutil.virtual_memory()
    limits = [HostMemory(machine.total, machine.available), *_limits(groups, mount)]
    return HostMemory(min(each.total for each in limits), min(each.free for each in limits))


def _limits(groups: Path, mount: Path) -> Iterator[HostMemory]:
    """The limits of this process's control groups, from the innermost outwards."""
    for line in _read(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = mount
            files = _FILES_2
        elif "memory" in controllers.split(","):
            root = mount / "memory"
            files = _FILES_1
        else:
            continue

        # Absent in some containers, whose limit is then at the root.
        inside = root / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if folder.is_relative_to(root) and (limit := _limit(folder, *files)):
                yield limit


def _limit(folder: Path, limit: str, used: str, droppable: str) -> HostMemory | None:
    """None where there is no limit ("max") or it cannot be read."""
    total = _read(folder / limit).strip()
    taken = _read(folder / used).strip()
    if not (total.isdecimal() and taken.isdecimal()):
        return None

    needed = int(taken)
    for line in _read(folder / "memory.stat").splitlines():
        name, _, count = line.partition(" ")
        if name == droppable and count.strip().isdecimal():
            needed -= int(count)
    return HostMemory(int(total), max(0, int(total) - max(0, needed)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # not every system has it, or shows it
        return ""
