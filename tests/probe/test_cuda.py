"""What only a CUDA card can show; run by `python -m benchmarks.gpu --stage correct`."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from autofit.core.budget import Budget
from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.probe import LocalExecutor, Plan, Request
from autofit.techniques import canonicalize

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


def measure(
    executor: LocalExecutor, workload: Workload, gib: float, *, micro_batch: int = 64
) -> Measurement:
    hardware = executor.detect("cuda")
    config = canonicalize({"micro_batch_size": micro_batch}, workload, hardware)
    budget = Budget(int(gib * GIB), hardware.host_free_bytes)
    return executor.measure(
        workload, Request(config, hardware, budget, Plan(max_seconds=1.0)), number=0
    )


def holding(gib: float, seconds: float = 0.0) -> Workload:
    """A workload whose every loss holds a tensor of that size beside next to nothing, for a while."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        held = torch.empty(int(gib * GIB), dtype=torch.uint8, device=batch["x"].device)
        time.sleep(seconds)
        return model(batch["x"]).pow(2).mean() + held[0].float() * 0

    return Workload(
        model=lambda: nn.Linear(64, 64),
        batch=lambda n: {"x": torch.randn(n, 64)},
        loss=loss,
        effective_batch_size=4,
    )


def until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes true in that time."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.2)
    return true()


def used_bytes() -> int:
    command = shutil.which("nvidia-smi")
    assert command, "a CUDA machine has nvidia-smi"
    query = [command, "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * MIB


def with_this_path() -> dict[str, str]:
    """The environment of a Python that imports what this one does, these tests among it."""
    path = [str(Path.cwd()), *(each or str(Path.cwd()) for each in sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def test_an_out_of_memory_is_caught_in_the_child_and_the_next_probe_is_unharmed(
    executor: LocalExecutor,
) -> None:
    assert measure(executor, wide(), 4).outcome is Outcome.OUT_OF_MEMORY
    assert measure(executor, wide(), 4, micro_batch=4).outcome is Outcome.FITS


def test_the_cap_holds_on_a_larger_card(executor: LocalExecutor) -> None:
    card = executor.detect("cuda").memory_bytes / GIB
    free = measure(executor, wide(), card)
    assert free.outcome is Outcome.FITS
    assert free.peak_bytes is not None
    assert free.peak_bytes.device is not None
    needed = free.peak_bytes.device / GIB / (1 - 0.05)  # the margin of a budget
    assert needed < card
    assert measure(executor, wide(), needed * 1.05).outcome is Outcome.FITS
    assert measure(executor, wide(), needed * 0.9).outcome is Outcome.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("gib", "outcome"),
    [(21.5, Outcome.FITS), (23.5, Outcome.OUT_OF_MEMORY), (25, Outcome.OUT_OF_MEMORY)],
)
def test_what_a_card_of_24_gib_would_refuse_fails_on_a_larger_one(
    executor: LocalExecutor, gib: float, outcome: Outcome
) -> None:
    """24 GiB less the margin of 5 % and the context leave some 22.3 GiB."""
    if executor.detect("cuda").memory_bytes < 32 * GIB:
        pytest.skip("needs a card of more than 32 GiB")
    seen = measure(executor, holding(gib), 24, micro_batch=4)
    assert seen.outcome is outcome, seen.reason
    assert measure(executor, holding(gib), 30, micro_batch=4).outcome is Outcome.FITS


def test_an_assert_in_a_kernel_is_told_and_the_next_probe_is_unharmed(
    executor: LocalExecutor,
) -> None:
    plain = holding(0.1)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        beyond = torch.full_like(batch["x"], 10**6, dtype=torch.long)
        return model(batch["x"]).flatten()[beyond].sum()

    workload = Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)
    seen = measure(executor, workload, 8, micro_batch=4)
    assert seen.outcome is Outcome.FAILED
    assert (seen.reason or "").splitlines()[-1].endswith("CUDA error: device-side assert triggered")
    assert seen.peak_bytes
    assert seen.peak_bytes.device
    assert measure(executor, plain, 8, micro_batch=4).outcome is Outcome.FITS


_FILLS = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - {left} * 2**20, dtype=torch.uint8, device="cuda")
print("holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def filled(left_mib: int) -> Iterator[None]:
    """Another process holds the card but for so much."""
    command = [sys.executable, "-c", _FILLS.format(left=left_mib)]
    # ends when its input does
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"holds\n"
        yield


def test_a_card_that_others_have_filled_is_no_measurement(executor: LocalExecutor) -> None:
    hardware = executor.detect("cuda")
    budget = Budget(8 * GIB, hardware.host_free_bytes)
    workload = holding(6.0)
    config = canonicalize({"micro_batch_size": 4}, workload, hardware)
    with (
        filled(64),
        pytest.raises(ProbeError, match="the card is full before autofit has taken any of it"),
    ):
        executor.measure(
            workload, Request(config, hardware, budget, Plan(max_seconds=1.0)), number=0
        )
    with (
        filled(64),
        pytest.raises(ProbeError, match="the card is full before autofit has taken any of it"),
    ):
        executor.detect("cuda")
    with filled(4096), pytest.raises(ProbeError, match="others use the card"):
        executor.measure(
            workload, Request(config, hardware, budget, Plan(max_seconds=1.0)), number=0
        )
    with filled(4096):
        assert measure(executor, holding(0.1), 8, micro_batch=4).outcome is Outcome.FITS
    assert measure(executor, workload, 8, micro_batch=4).outcome is Outcome.FITS


@pytest.mark.parametrize(
    ("optimizer", "small"), [("paged-adamw-8bit", True), ("adamw-8bit", False)]
)
def test_the_card_is_as_small_as_the_budget_where_state_moves_to_the_host(
    executor: LocalExecutor, optimizer: str, small: bool
) -> None:
    """And what is held for that does not count: the config takes next to nothing."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if (torch.cuda.mem_get_info()[0] < 8 * GIB) is not small:
            raise ValueError("the card has another size")
        return model(batch["x"]).pow(2).mean()

    wide = Workload(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        batch=lambda n: {"x": torch.randn(n, WIDTH)},
        loss=loss,
        effective_batch_size=4,
    )
    hardware = executor.detect("cuda")
    if hardware.memory_bytes < 16 * GIB:
        pytest.skip("needs a card of more than 16 GiB")
    config = canonicalize({"optimizer": optimizer}, wide, hardware)
    budget = Budget(8 * GIB, hardware.host_free_bytes)
    seen = executor.measure(
        wide, Request(config, hardware, budget, Plan(max_seconds=1.0)), number=0
    )
    assert seen.fits, seen.reason
    assert seen.peak_bytes
    assert seen.peak_bytes.device
    assert seen.peak_bytes.device < 2 * GIB


def test_state_that_finds_no_room_below_the_budget_moves_to_the_host(
    executor: LocalExecutor,
) -> None:
    """Of 3 GiB, 1 GiB are weights in bf16, 1 GiB gradients and 1 GiB state, beside the context and activations."""
    workload = Workload(
        model=lambda: nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8))),
        batch=lambda n: {"x": torch.randn(n, 8192)},
        loss=lambda model, batch: model(batch["x"]).float().pow(2).mean(),
        effective_batch_size=4,
    )
    seen = {}
    hardware = executor.detect("cuda")
    for optimizer in ("adamw-8bit", "paged-adamw-8bit"):
        config = canonicalize({"optimizer": optimizer, "precision": "bf16"}, workload, hardware)
        budget = Budget(int(3.2 * GIB), hardware.host_free_bytes)
        seen[optimizer] = executor.measure(
            workload, Request(config, hardware, budget, Plan(max_seconds=1.0)), number=len(seen)
        )
    assert seen["adamw-8bit"].outcome is Outcome.OUT_OF_MEMORY, seen["adamw-8bit"].reason
    assert seen["paged-adamw-8bit"].fits, seen["paged-adamw-8bit"].reason


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_the_peak_of_a_compiled_step_is_without_what_the_compiler_tried_kernels_on(
    executor: LocalExecutor, mode: str
) -> None:
    hardware = executor.detect("cuda")
    budget = Budget(hardware.memory_bytes, hardware.host_free_bytes)
    peaks = []
    for compiled in ("none", mode):
        config = canonicalize({"micro_batch_size": 8, "compile": compiled}, wide(), hardware)
        seen = executor.measure(
            wide(), Request(config, hardware, budget, Plan(max_seconds=1.0)), number=len(peaks)
        )
        assert seen.fits, seen.reason
        assert seen.peak_bytes
        peaks.append(seen.peak_bytes.allocated)
    assert peaks[1] < peaks[0] * 1.05


def test_children_find_the_libraries_imported_and_the_card_closed(executor: LocalExecutor) -> None:
    """A library that opens the card while it is imported would leave the zygote with nothing preloaded."""
    executor.detect("cuda")
    arguments = Path(f"/proc/{executor._process.pid}/cmdline").read_text()
    assert "autofit.probe.zygote" in arguments
    assert "--bare" not in arguments


_TAKES_256_MIB = """
import torch
from autofit.probe.steps import peak_resident_bytes
torch.ones(1, device="cuda")
before = peak_resident_bytes()
taken = {taken}
taken.fill_(1)
print(peak_resident_bytes() - before)
"""


@pytest.mark.parametrize(
    "taken",
    [
        'torch.empty(2**28, dtype=torch.uint8, device="cpu", pin_memory=True)',
        '__import__("bitsandbytes").functional.get_paged(2**28, dtype=torch.uint8)',
    ],
    ids=["pinned", "paged"],
)
def test_what_is_offloaded_counts_in_the_hosts_memory(taken: str) -> None:
    """The host's budget goes by the resident set; whether the driver's pages are in it, only a card shows."""
    command = [sys.executable, "-c", _TAKES_256_MIB.format(taken=taken)]
    seen = subprocess.run(
        command, capture_output=True, text=True, check=True, env=with_this_path()
    ).stdout
    assert int(seen) > 0.9 * 256 * MIB


_MEASURES = """
import torch
from autofit.probe import LocalExecutor
from tests.probe.test_cuda import holding, measure
with LocalExecutor() as executor:
    assert measure(executor, holding(0.1), 8, micro_batch=4).fits
print(torch.cuda.is_initialized())
"""


def test_the_parent_never_opens_the_device() -> None:
    """In a process of its own: other tests have opened it in this one."""
    command = [sys.executable, "-c", _MEASURES]
    seen = subprocess.run(
        command, capture_output=True, text=True, check=True, env=with_this_path()
    ).stdout
    assert seen == "False\n"


def test_a_hanging_child_is_killed_and_leaves_no_memory_behind() -> None:
    before = used_bytes()
    with LocalExecutor(timeout=15.0) as executor:
        measure(executor, wide(), 8, micro_batch=4)  # the first probe has twice the time
        assert measure(executor, wide(seconds=60.0), 8, micro_batch=4).outcome is Outcome.TIMED_OUT
    assert used_bytes() - before < 64 * MIB


def test_a_killed_child_leaves_no_memory_behind_and_the_next_probe_is_unharmed(
    executor: LocalExecutor,
) -> None:
    before = used_bytes()
    assert measure(executor, holding(0.1), 8, micro_batch=4).outcome is Outcome.FITS
    seen: list[Measurement] = []
    hanging = threading.Thread(
        target=lambda: seen.append(measure(executor, holding(3, 600.0), 8, micro_batch=4))
    )
    hanging.start()
    assert until(lambda: used_bytes() - before > 3 * GIB)
    for child in psutil.Process(executor._process.pid).children():
        child.kill()
    hanging.join(timeout=60)
    # what a kill by the system means
    assert [each.outcome for each in seen] == [Outcome.HOST_OUT_OF_MEMORY]
    assert until(lambda: used_bytes() - before < 64 * MIB)
    assert measure(executor, holding(0.1), 8, micro_batch=4).outcome is Outcome.FITS


_HANGS = """
from autofit.probe import LocalExecutor
from tests.probe.test_cuda import holding, measure
with LocalExecutor() as executor:
    measure(executor, holding(3, 600.0), 8, micro_batch=4)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_child_and_the_memory_along(how: signal.Signals) -> None:
    before = used_bytes()
    parent = subprocess.Popen([sys.executable, "-c", _HANGS], env=with_this_path())
    try:
        assert until(lambda: used_bytes() - before > 3 * GIB, 120.0)
    finally:
        parent.send_signal(how)
        parent.wait()
    assert until(lambda: used_bytes() - before < 64 * MIB)
