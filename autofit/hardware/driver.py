"""Whether there can be a GPU at all, found out before anything heavy is imported. Only a certain no
counts; anything that takes seconds of imports to find out is left to PyTorch."""

import ctypes
import importlib.util
import runpy
from pathlib import Path
from typing import Any

# PyTorch opens it as well; containers and login nodes without a card have none.
_DRIVER = "libcuda.so.1"


def why_no_gpu() -> str | None:
    """Why PyTorch will find no GPU here, as half a sentence; None where it may find one."""
    build = _build()
    if build.get("hip") or build.get("xpu"):
        return None
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return "there is no GPU on this machine"
    if build.get("cuda"):
        return None
    return "this PyTorch was built without CUDA, and can use no GPU"


def no_gpu_note(why: str) -> str:
    """The note of a search that only predicts."""
    return f"{why[0].upper()}{why[1:]}, so nothing can be measured: the best config is predicted."


def _build() -> dict[str, Any]:
    """The build of PyTorch, from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin:
        file = Path(spec.origin).with_name("version.py")
        if file.is_file():
            return runpy.run_path(str(file))
    return {"cuda": "unknown"}
