"""The link between the ranks at hand, measured by all-gathers of five sizes in about a second."""

import statistics
import time

import torch
import torch.distributed as dist

from autofit.core.links import Link

_SIZES = tuple(2**power for power in (12, 16, 19, 22, 24))  # bytes gathered
_SECONDS = 0.15  # for each size
_LEAST, _MOST = 3, 50  # times


def measured_link(device: torch.device) -> Link:
    """The link of the default group, whose ranks all call this; all of them find the same."""
    ranks = dist.get_world_size()
    took = [_gathering(size // ranks, device) for size in _SIZES]
    slowest = torch.tensor(took, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    each_sends = [size * (ranks - 1) / ranks for size in _SIZES]
    start, per_byte = fitted(each_sends, slowest.tolist())
    return Link("measured here", 1 / per_byte, start / (ranks - 1))


def fitted(sizes: list[float], took: list[float]) -> tuple[float, float]:
    """(seconds whatever the size, seconds of a byte): the line of the least squares of relative errors."""
    weights = [1 / seconds**2 for seconds in took]
    total = sum(weights)
    size = sum(map(float.__mul__, weights, sizes)) / total
    mean = sum(map(float.__mul__, weights, took)) / total
    pairs = list(zip(weights, sizes, took, strict=True))
    slope = sum(w * (s - size) * (t - mean) for w, s, t in pairs) / sum(
        w * (s - size) ** 2 for w, s, _ in pairs
    )
    slope = max(slope, 1e-15)
    return max(mean - slope * size, 0.0), slope


def _gathering(nbytes: int, device: torch.device) -> float:
    """The median time of an all-gather of so many bytes from each rank; all ranks repeat it equally often."""
    part = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    whole = torch.empty(nbytes * dist.get_world_size(), dtype=torch.uint8, device=device)
    first = max(_timed(whole, part) for _ in range(2))
    agreed = torch.tensor(first, dtype=torch.float64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    count = min(max(int(_SECONDS / agreed.item()), _LEAST), _MOST)
    return statistics.median(_timed(whole, part) for _ in range(count))


def _timed(whole: torch.Tensor, part: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_gather_into_tensor(whole, part)
    if whole.device.type == "cuda":
        torch.cuda.synchronize(whole.device)
    return time.perf_counter() - began
