"""How fast the host's processor calls small operators, as it must to launch them on a card;
measured once a machine."""

import math
import platform
import time

import torch

from autofit.core.files import cache_file, digest, read_cache, write_cache

OPERATORS = 100  # of a chain
_CHAINS = 20  # at least
_SECONDS = 0.2  # for at most about so long


def dispatch_seconds(name: str) -> float:
    """Seconds of one small operator on this processor, and as much again of its gradient: the
    shortest of many chains, kept on disk so that what is predicted today is predicted tomorrow.

    Args:
        name: of the processor.
    """
    facts = ("dispatch", name, platform.python_version(), torch.__version__)
    path = cache_file("rates", f"{digest(repr(facts))}.json")
    found: float | None = read_cache(path, float)
    if found is None:
        found = _measured()
        write_cache(path, found)
    return found


def _measured() -> float:
    small = torch.ones(8)
    shortest = math.inf
    start = time.perf_counter()
    for number in range(100 * _CHAINS):
        began = time.perf_counter()
        chain(small.clone().requires_grad_()).sum().backward()
        shortest = min(shortest, time.perf_counter() - began)
        if number >= _CHAINS and time.perf_counter() - start > _SECONDS:
            break
    return shortest / (2 * OPERATORS)


def chain(small: torch.Tensor) -> torch.Tensor:
    """OPERATORS additions, one after the other."""
    for _ in range(OPERATORS):
        small = small.add(1)
    return small
