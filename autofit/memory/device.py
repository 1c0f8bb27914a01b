"""What this machine offers. Asks the CUDA driver, so it runs in a child process: the parent never opens the device."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from autofit.core.errors import ProbeError
from autofit.core.hardware import MIB, Hardware


def detect(device: str | None = None) -> Hardware:
    """The facts of `device` ("cuda" or "cpu"; None: CUDA card 0 where there is one, else the CPU).

    Raises:
        ProbeError: CUDA was asked for and is not there.
    """
    if device != "cpu" and torch.cuda.is_available():
        return _cuda()
    if device == "cuda":
        raise ProbeError(
            "there is no CUDA device here, so nothing can be measured for a GPU.",
            "Run on a machine with the card, or search for the CPU with --device cpu --mem GIB.",
        )
    return _cpu()


def _cpu() -> Hardware:
    memory = psutil.virtual_memory()
    return Hardware(
        device="cpu",
        name=_cpu_name(),
        memory_bytes=memory.total,
        host_memory_bytes=memory.total,
        host_free_bytes=memory.available,
        cores=len(os.sched_getaffinity(0)),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _cuda() -> Hardware:
    before = used_bytes_without_context()
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    used = total - free - torch.cuda.memory_reserved(0)
    properties = torch.cuda.get_device_properties(0)
    return replace(
        _cpu(),
        device="cuda",
        name=properties.name,
        memory_bytes=total,
        capability=(properties.major, properties.minor),
        context_bytes=max(0, used - before),
    )


def visible_cards() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls each card that can be seen, card 0 first; nothing is opened.

    Of instances of a card (MIG) CUDA shows a process but one, so all that are named there are told.
    """
    named = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if named[0].startswith("MIG-"):
        return tuple(filter(None, named))
    count = torch.cuda.device_count()
    return tuple(named[:count] if named[0] else map(str, range(count)))


def used_bytes_without_context() -> int:
    """What other processes hold on card 0, from nvidia-smi: it opens no context. 0 where it is not installed."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [command, f"--id={card}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs is not this question's to report
        return 0
    text = answer.stdout.strip()
    return int(text) * MIB if answer.returncode == 0 and text.isdigit() else 0
