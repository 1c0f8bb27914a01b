"""Where results are kept: a directory for each card, since figures of two cards say nothing of one another."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from autofit.core.environment import versions
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from benchmarks.gpu.store import Row, Store

_QUERY_SECONDS = 30


def slug(name: str) -> str:
    """The directory of a card: "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def queried(what: str) -> str | None:
    """What nvidia-smi says of the first card; None where it is not there or does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--id=0", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # of interest, but not more
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def described(hardware: Hardware) -> Row:
    """What all figures of a store have in common."""
    return {
        "smoke": hardware.device == "cpu",
        "hardware": hardware.to_dict(),
        "versions": versions(),
        "driver": queried("driver_version"),
        "begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def stores(results: Path) -> list[Path]:
    """The directories of all cards that figures are kept of."""
    return sorted(path.parent for path in results.glob("*/items.jsonl"))


def take(path: Path, results: Path) -> Path:
    """Add the rows of another store, as a lent machine leaves it, to that of its card; returns the directory.

    Raises:
        InputError: the file does not say which card it is of.
    """
    taken = Store(path)
    about = taken.get("about")
    if about is None:
        raise InputError(
            f"{path} does not say which card it is of.",
            "Give the items.jsonl of a benchmark or a list.",
        )
    directory = results / slug(about["hardware"]["name"])
    store = Store(directory / "items.jsonl")
    for stage in taken.stages():
        if stage != "about" or store.get("about") is None:
            for key, row in taken.rows(stage).items():
                store.add(stage, key, row)
    return directory
