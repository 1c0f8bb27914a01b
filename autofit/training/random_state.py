"""Random state: every generator that training and its loaders draw from, captured and restored together.

torch's (host and device), Python's and numpy's, since augmentations use any of them; captured as plain values, arrays
and tensors, which a checkpoint reads back without running code.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """The state of every generator."""
    return {**capture_torch(device), "python": random.getstate(), "numpy": np.random.get_state(legacy=False)}


def capture_torch(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators, in a microsecond; numpy's takes 30 to copy, too slow for every step."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Restore every captured generator; that of a device only on a device of its kind."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" not in state:
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def is_at(state: dict[str, Any]) -> bool:
    """Whether the host's generators are where they were captured: nothing was drawn since."""
    now = capture(torch.device("cpu"))
    numpy_now, numpy_before = now["numpy"], state["numpy"]
    if now["python"] != state["python"] or numpy_now["state"]["pos"] != numpy_before["state"]["pos"]:
        return False
    if not np.array_equal(numpy_now["state"]["key"], numpy_before["state"]["key"]):
        return False
    return bool(torch.equal(now["torch"], state["torch"]))


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Undo all draws made inside."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


def seed_host(seed: int) -> None:
    """Seed what loaders draw from; generators of a device are left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
