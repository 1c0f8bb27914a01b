"""Every random number generator that training and its loaders draw from, taken down and put back together.

torch's (on the host and on the device), Python's and numpy's: augmentations use any of them. What is taken down are
plain values and tensors, which a checkpoint reads back without running code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Where every generator stands."""
    numpy = _mapped(np.random.get_state(legacy=False), np.ndarray, torch.from_numpy)
    return {**capture_torch(device), "python": random.getstate(), "numpy": numpy}


def capture_torch(device: torch.device) -> dict[str, Any]:
    """Where torch's generators stand, in a microsecond: numpy's takes 30 to copy, too much for every step."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator that was taken down where it stood; that of a device only on a device of its kind."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" not in state:
        return
    random.setstate(state["python"])
    np.random.set_state(_mapped(state["numpy"], torch.Tensor, torch.Tensor.numpy))


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside is not missing outside."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


def seed_host(seed: int) -> None:
    """Begin anew what loaders draw from; generators of a device are left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _mapped(state: Any, kind: type, function: Any) -> Any:
    """The same nested dict with `function` applied to what is of a kind."""
    if isinstance(state, dict):
        return {key: _mapped(value, kind, function) for key, value in state.items()}
    return function(state) if isinstance(state, kind) else state
