"""What a probe through Ray takes beside one of this machine: the same steps of one config by turns, in one run.

python -m benchmarks.cluster_overhead [--probes 8] [--seconds 2]
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.hardware import GIB
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.models import resolve
from autofit.probe import Executor, LocalExecutor, Plan, RayExecutor, Request

_FIRST = 2  # probes of each that warm up


def main() -> None:
    """Print the median seconds of both, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=8, help="of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed steps in each")
    given = parser.parse_args()
    workload = resolve("tiny-llama", sequence_length=64, effective_batch_size=4)
    took: dict[str, list[float]] = {"here": [], "through Ray": []}
    options = search_options(executor="ray", device="cpu", mem=2)
    with (
        tempfile.TemporaryDirectory() as name,
        LocalExecutor(Path(name)) as here,
        RayExecutor(options, Path(name)) as ray,
    ):
        hardware, _ = here.inspect(workload, "cpu", 2 * GIB)
        config = techniques.canonicalize({"attention": "eager"}, workload, hardware)
        request = Request(config, hardware, Budget(2 * GIB, 4 * GIB), Plan(compose=False))
        steps = here.measure(workload, request, number=0).step_seconds
        assert steps, "tiny-llama fits"
        count = max(3, round(given.seconds / steps.median))
        plan = Plan(min_steps=count, max_steps=count, max_seconds=60.0, compose=False)
        request = dataclasses.replace(request, plan=plan)
        for number in range(given.probes + _FIRST):
            for name, executor in (("here", here), ("through Ray", ray)):
                seconds = _measured(executor, workload, request, number)
                took[name] += [seconds] if number >= _FIRST else []
    for name, seconds_of in took.items():
        median, low, high = statistics.median(seconds_of), min(seconds_of), max(seconds_of)
        print(f"{name:<12} {median:6.3f} s   ({low:.3f} to {high:.3f})")
    print(
        f"ratio        {statistics.median(took['through Ray']) / statistics.median(took['here']):6.3f}"
    )


def _measured(executor: Executor, workload: Workload, request: Request, number: int) -> float:
    start = time.monotonic()
    found = executor.measure(workload, request, number=number)
    assert found.fits, found.reason
    return time.monotonic() - start


if __name__ == "__main__":
    main()
