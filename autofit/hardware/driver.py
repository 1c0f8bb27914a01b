"""Whether there can be a GPU at all, asked of the driver's libraries before anything heavy is imported.

Only a sure no is told here; what takes seconds of imports to find out is asked again when PyTorch is there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path
from typing import Any

_DRIVER = "libcuda.so.1"  # which PyTorch opens as well; containers and login nodes without a card have none


def why_no_gpu() -> str | None:
    """Why PyTorch will find no GPU here, as half a sentence; None where it may find one."""
    build = _build()
    if build.get("hip") or build.get("xpu"):
        return None
    driver = _has_driver()
    if not driver:
        return "there is no GPU on this machine"
    return None if build.get("cuda") else "this PyTorch was built without CUDA, and can use no GPU"


def no_gpu_note(why: str) -> str:
    """What a search says then."""
    return f"{why[0].upper()}{why[1:]}, so nothing can be measured: the best config is predicted."


def _build() -> dict[str, Any]:
    """What PyTorch was built for, from the file that says it: importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    return runpy.run_path(str(file)) if file and file.is_file() else {"cuda": "unknown"}


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True
