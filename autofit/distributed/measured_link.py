"""The link between the ranks at hand, measured by all-gathers of five sizes in about a second."""

import statistics
import time

import torch
import torch.distributed as dist

from autofit.core.links import Link

_SIZES = tuple(2**power for power in (12, 16, 19, 22, 24))  # bytes gathered
_SECONDS = 0.15  # for each size
_LEAST = 3  # times
_MOST = 50


def measured_link(device: torch.device) -> Link:
    """The link of the default group, whose ranks all call this; all of them find the same."""
    ranks = dist.get_world_size()
    sent = []  # bytes by each rank
    took = []
    for size in _SIZES:
        sent.append(size * (ranks - 1) / ranks)
        took.append(_gathering(size // ranks, device))

    slowest = torch.tensor(took, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    start, per_byte = fitted(sent, slowest.tolist())
    return Link("measured here", 1 / per_byte, start / (ranks - 1))


def fitted(sizes: list[float], took: list[float]) -> tuple[float, float]:
    """The line of the least squares of relative errors.

    Returns:
        Seconds whatever the size, and seconds of a byte.
    """
    weights = [1 / seconds**2 for seconds in took]
    total = sum(weights)
    mean_size = sum(map(float.__mul__, weights, sizes)) / total
    mean_seconds = sum(map(float.__mul__, weights, took)) / total

    covariances = []
    variances = []
    for weight, size, seconds in zip(weights, sizes, took, strict=True):
        deviation = size - mean_size
        covariances.append(weight * deviation * (seconds - mean_seconds))
        variances.append(weight * deviation**2)

    slope = max(sum(covariances) / sum(variances), 1e-15)
    return max(mean_seconds - slope * mean_size, 0.0), slope


def _gathering(nbytes: int, device: torch.device) -> float:
    """The median time of an all-gather of so many bytes from each rank.

    All ranks repeat it equally often.
    """
    part = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    whole = torch.empty(nbytes * dist.get_world_size(), dtype=torch.uint8, device=device)

    first = max(_timed(whole, part), _timed(whole, part))
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
