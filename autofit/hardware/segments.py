"""The settings of PyTorch's CUDA allocator while a process runs, above all whether its segments may
grow.

`core.environment` sets them before torch is loaded: too late in a process of the user's. And some
drivers cannot grow segments at all: those of some virtual GPUs, of WSL, and old ones do not manage
virtual memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from autofit.core.environment import ALLOCATOR, EXPANDABLE, FIXED, allocator_variable

# The last of this process's changes, because PyTorch 2.11 cannot read its settings.
_set_here: list[str] = []


def settings() -> str:
    """The allocator's settings as it last read them; empty where nobody has set any."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read:
        return str(read())
    if _set_here:
        return _set_here[-1]
    return os.environ.get(allocator_variable() or "", "")


def change(text: str) -> None:
    """Apply other settings to allocations from now on, not to memory already allocated. Opens no
    device."""
    if text and text != settings():
        _set(text)


def _set(text: str) -> None:
    torch._C._accelerator_setAllocatorSettings(text)
    _set_here[:] = [text]


def open_card() -> str:
    """Allocate a first segment of card 0, a fixed one where they cannot grow; return the settings
    that hold then.

    Raises:
        RuntimeError: nothing can be allocated.
    """
    try:
        _allocate()
    except RuntimeError as error:
        # The driver's refusal is a plain RuntimeError. The other kinds are not the segments' fault.
        if type(error) is not RuntimeError or EXPANDABLE not in settings():
            raise
        change(settings().replace(EXPANDABLE, FIXED))
        _allocate()
    return settings()


def _allocate() -> None:
    """Allocate a new segment even where others have room, by a new stream, which has segments of
    its own."""
    # A stream itself costs memory, so there is none where there are no segments yet, as where
    # probes open the card.
    in_use = torch.cuda.memory_reserved(0) > 0
    with torch.cuda.stream(torch.cuda.Stream()) if in_use else nullcontext():
        torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    if in_use:
        torch.cuda.empty_cache()


@contextmanager
def as_in_probes(device: str | None, notify: Callable[[str], Any]) -> Iterator[None]:
    """Let segments grow inside as they do in probes, unless the user has set the allocator; does
    nothing on a CPU.

    Free memory is released first, because it lies in segments that cannot grow.
    """
    if device == "cpu" or not torch.cuda.is_available() or settings():
        yield
        return

    variable = allocator_variable()
    backend = torch.cuda.get_allocator_backend()
    reason: str | None = None
    if variable:
        reason = f"{variable} was set after torch was loaded, which reads it before"
    elif backend != "native":
        reason = f"segments cannot grow ({ALLOCATOR}) in the allocator {backend}"
    if reason:
        notify(f"{reason}, so training may need some percent more memory than was measured.")
        yield
        return

    change(EXPANDABLE)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        for text in (FIXED, ""):  # the second only forgets that there was a first
            _set(text)
