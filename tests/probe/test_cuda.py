"""What only a CUDA card can show; run by `python -m benchmarks.gpu --stage correct`."""

import shutil
import subprocess
import time

import pytest
import torch
from torch import nn

from autofit.core.budget import Budget
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.probe import Plan, Prober
from autofit.techniques import settle

pytestmark = pytest.mark.gpu

WIDTH = 4096


def wide(seconds: float = 0.0) -> Workload:
    """A workload whose activations grow by some 64 MiB a sample: 1024 rows of 4096 floats after each of 4 layers."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(seconds)
        return model(batch["x"]).float().pow(2).mean()

    return Workload(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
        batch=lambda n: {"x": torch.randn(n, 1024, WIDTH)},
        loss=loss,
        effective_batch_size=64,
    )


def measure(prober: Prober, workload: Workload, gib: float, *, micro_batch: int = 64) -> Measurement:
    hardware = prober.detect("cuda")
    config = settle({"micro_batch_size": micro_batch}, workload, hardware)
    budget = Budget(int(gib * GIB), hardware.host_free_bytes)
    return prober.measure(workload, config, hardware, budget, plan=Plan(max_seconds=1.0), number=0)


def used_bytes() -> int:
    command = shutil.which("nvidia-smi")
    assert command, "a CUDA machine has nvidia-smi"
    query = [command, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * MIB


def test_an_out_of_memory_is_caught_in_the_child_and_the_next_probe_is_unharmed() -> None:
    with Prober() as prober:
        assert measure(prober, wide(), 4).outcome is Outcome.OUT_OF_MEMORY
        assert measure(prober, wide(), 4, micro_batch=4).outcome is Outcome.FITS


def test_the_cap_holds_on_a_larger_card() -> None:
    with Prober() as prober:
        card = prober.detect("cuda").memory_bytes / GIB
        free = measure(prober, wide(), card)
        assert free.outcome is Outcome.FITS
        assert free.peak_bytes is not None
        assert free.peak_bytes.device is not None
        needed = free.peak_bytes.device / GIB / (1 - 0.05)  # the margin of a budget
        assert needed < card
        assert measure(prober, wide(), needed * 1.05).outcome is Outcome.FITS
        assert measure(prober, wide(), needed * 0.9).outcome is Outcome.OUT_OF_MEMORY


def test_the_parent_never_opens_the_device() -> None:
    with Prober() as prober:
        measure(prober, wide(), 8, micro_batch=4)
    assert not torch.cuda.is_initialized()


def test_a_hanging_child_is_killed_and_leaves_no_memory_behind() -> None:
    before = used_bytes()
    with Prober(timeout=15.0) as prober:
        measure(prober, wide(), 8, micro_batch=4)  # the first probe has twice the time
        assert measure(prober, wide(seconds=60.0), 8, micro_batch=4).outcome is Outcome.TIMED_OUT
    assert used_bytes() - before < 64 * MIB
