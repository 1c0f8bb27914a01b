"""How fast bytes are copied between card 0 and its host; measured once a machine."""

import time
from collections.abc import Callable

import torch

from autofit.core.files import cache_file, digest, read_cache, write_cache
from autofit.core.hardware import MIB

_NBYTES = 64 * MIB
_ROUNDS = 8


def host_link(name: str) -> float | None:
    """Bytes per second between pinned memory of the host and card 0, the mean of both directions;
    kept on disk so that what is predicted today is predicted tomorrow.

    Args:
        name: of the host's processor and the card.

    Returns:
        None where there is no room for 64 MiB.
    """
    path = cache_file("rates", f"{digest(repr(('link', name, torch.__version__)))}.json")
    found: float | None = read_cache(path, float)
    if found is None:
        try:
            found = measured("cuda", torch.cuda.synchronize)
        except RuntimeError:
            # The card, or what may be pinned, is full: whoever needs the room will say so.
            return None
        write_cache(path, found)
    return found


def measured(
    device: str, finished: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second of copies to the device and back, each direction's shortest of some.

    Args:
        finished: waits for a copy.
    """
    there = torch.empty(_NBYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_NBYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    shortest = []
    for target, source in ((there, here), (here, there)):
        times = []
        for _ in range(_ROUNDS):
            finished()
            began = clock()
            target.copy_(source, non_blocking=True)
            finished()
            times.append(max(clock() - began, 1e-9))
        shortest.append(min(times))
    return 2 * _NBYTES / sum(shortest)
