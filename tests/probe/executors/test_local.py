"""Every way a probe can end, for real, each in a child process; at the end the executor is unharmed."""

import atexit
import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.errors import InputError, ProbeError
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.probe import LocalExecutor, Plan, Request
from autofit.setup import Setup, Stage, Technique
from autofit.training.workload import workload_from
from tests import tiny
from tests.processes import number_in, wait_until_gone

BUDGET = Budget(GIB, 4 * GIB)
QUICK = Plan(min_steps=2, max_steps=2)

Loss = Callable[[nn.Module, Any], torch.Tensor]


def measure(
    executor: LocalExecutor,
    workload: Workload,
    knobs: Mapping[str, Any] | None = None,
    *,
    budget: Budget = BUDGET,
    plan: Plan = QUICK,
    number: int = 0,
) -> Measurement:
    config = techniques.canonicalize(knobs or {}, workload, tiny.CPU)
    return executor.measure(workload, Request(config, tiny.CPU, budget, plan), number=number)


def workload_of(loss: Loss) -> Workload:
    """The training of a small network with a loss that does something else too."""
    plain = tiny.mlp_workload()
    return Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)


def doing(action: Callable[[], object]) -> Workload:
    """Training whose loss does `action` first."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        action()
        return tiny.classify(model, batch)

    return workload_of(loss)


@pytest.fixture
def impatient(executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> LocalExecutor:
    """The shared executor, which waits two seconds for a probe."""
    monkeypatch.setattr(executor, "timeout", 2.0)
    monkeypatch.setattr(executor, "_probes", 1)
    return executor


@pytest.fixture(scope="module", autouse=True)
def unharmed(executor: LocalExecutor) -> Iterator[None]:
    """After all these tests a probe fits; that each costs only itself is shown by `test_conformance`."""
    yield
    assert measure(executor, tiny.mlp_workload()).outcome is Outcome.FITS


def test_fits_with_every_figure(executor: LocalExecutor) -> None:
    seen = measure(executor, tiny.llama_workload(), {"micro_batch_size": 2}, number=3)
    assert seen.outcome is Outcome.FITS
    assert seen.number == 3
    assert seen.reason is None
    assert seen.config["gradient_accumulation_steps"] == 2
    assert seen.steps == 2
    assert seen.step_seconds
    assert 0 < seen.step_seconds.low <= seen.step_seconds.median <= seen.step_seconds.high
    assert seen.samples_per_second == pytest.approx(4 / seen.step_seconds.median)
    assert seen.tokens_per_second == pytest.approx(4 * 16 / seen.step_seconds.median)
    assert seen.peak_bytes
    assert seen.peak_bytes.reserved is seen.peak_bytes.device is None
    assert seen.peak_bytes.resident
    assert seen.peak_bytes.resident > seen.peak_bytes.allocated > 4 * 37_000
    assert seen.loss == pytest.approx(4.2, abs=0.3)  # ln 64: nothing is learnt yet
    assert 0 < seen.build_seconds + seen.warmup_seconds < seen.seconds


def test_samples_per_second_where_the_unit_is_samples(executor: LocalExecutor) -> None:
    seen = measure(executor, tiny.mlp_workload())
    assert seen.samples_per_second
    assert seen.tokens_per_second is None


def test_the_peak_is_the_same_on_every_run_and_the_verdict_flips_at_it(
    executor: LocalExecutor,
) -> None:
    workload = tiny.transformer_workload()
    first, second = (measure(executor, workload, {"micro_batch_size": 2}) for _ in range(2))
    assert first.peak_bytes
    assert second.peak_bytes
    peak = first.peak_bytes.allocated
    assert second.peak_bytes.allocated == peak
    for budget, outcome in ((peak, Outcome.FITS), (peak - 1, Outcome.OUT_OF_MEMORY)):
        seen = measure(executor, workload, {"micro_batch_size": 2}, budget=Budget(budget, GIB))
        assert seen.outcome is outcome
        assert seen.peak_bytes
        assert seen.peak_bytes.allocated == peak  # the nearest miss is told in bytes
    assert first.shortage is None
    assert seen.shortage  # at the moment at which the budget was passed
    assert sum(seen.shortage.held.values()) == peak
    assert seen.shortage.asked_bytes
    assert seen.shortage.largest


def test_far_too_large_stops_before_it_takes_the_memory(executor: LocalExecutor) -> None:
    workload = Workload(
        model=lambda: nn.Linear(1024, 1024),
        batch=lambda n: {"input": torch.zeros(n, 1024)},
        loss=lambda model, batch: sum(model(**batch).pow(2).mean() for _ in range(1000)),
        effective_batch_size=1024,
    )
    seen = measure(executor, workload, budget=Budget(40 << 20, GIB))
    assert seen.outcome is Outcome.OUT_OF_MEMORY
    assert seen.step_seconds is None
    assert seen.peak_bytes
    assert 60 << 20 < seen.peak_bytes.allocated < 70 << 20


def test_an_allocation_that_the_guard_forbids_is_out_of_memory(executor: LocalExecutor) -> None:
    # never touched, so no page of it is ever taken
    seen = measure(executor, doing(lambda: bytearray(4 << 30)))
    assert seen.outcome is Outcome.OUT_OF_MEMORY
    assert "limit" in (seen.reason or "")


def test_refused(executor: LocalExecutor) -> None:
    workload = Workload(
        model=lambda: nn.Linear(2, 1),
        batch=lambda n: torch.ones(n, 2),
        loss=lambda model, batch: model(batch).mean(),
        effective_batch_size=2,
    )
    seen = measure(executor, workload, {"activation_checkpointing": "full"})
    assert seen.outcome is Outcome.REFUSED
    assert "no repeated blocks" in (seen.reason or "")


@pytest.mark.parametrize("good_steps", [0, 3], ids=["at once", "in the timed steps"])
def test_diverged(executor: LocalExecutor, good_steps: int) -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return tiny.classify(model, batch) * (1.0 if len(calls) <= good_steps else torch.nan)

    seen = measure(executor, workload_of(loss))
    assert seen.outcome is Outcome.DIVERGED
    assert seen.reason == "the loss is nan"
    assert seen.loss is None
    assert seen.step_seconds is None
    assert not calls, "the loss ran in the parent"


def test_timed_out_in_the_factory(impatient: LocalExecutor) -> None:
    def slow() -> nn.Module:
        time.sleep(600)
        return tiny.MLP()

    workload = Workload(model=slow, batch=tiny.mlp_workload().batch, loss=tiny.classify)
    for _ in range(2):  # nothing of one may be left to be heard in the next
        seen = measure(impatient, workload)
        assert seen.outcome is Outcome.TIMED_OUT
        assert seen.reason == "took more than 2 s"


def test_a_plan_may_allow_less_time_than_the_executor(executor: LocalExecutor) -> None:
    seen = measure(executor, doing(lambda: time.sleep(600)), plan=Plan(seconds=1.0))
    assert (seen.outcome, seen.reason) == (Outcome.TIMED_OUT, "took more than 1 s")


def test_timed_out_takes_its_grandchildren_along(impatient: LocalExecutor, tmp_path: Path) -> None:
    def sleep() -> None:
        grandchild = subprocess.Popen(["sleep", "600"])
        (tmp_path / "child").write_text(f"{os.getpid()}\n")
        (tmp_path / "grandchild").write_text(f"{grandchild.pid}\n")
        time.sleep(600)

    assert measure(impatient, doing(sleep)).outcome is Outcome.TIMED_OUT
    wait_until_gone([number_in(tmp_path / "child"), number_in(tmp_path / "grandchild")])


def test_what_a_probe_starts_and_forgets_ends_with_it(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    """It also holds the pipe open, through which the answer comes; and a daemon, which ignores what asks it to end."""

    def forget() -> None:
        if (tmp_path / "forgotten").exists():
            return
        if (forgotten := os.fork()) == 0:
            time.sleep(600)
        (tmp_path / "forgotten").write_text(f"{forgotten}\n")
        command = 'trap "" TERM; (while :; do sleep 1; done) & echo $! > "$0"'
        subprocess.run(["setsid", "sh", "-c", command, str(tmp_path / "daemon")], check=True)

    assert measure(executor, doing(forget)).outcome is Outcome.FITS
    wait_until_gone([number_in(tmp_path / "forgotten"), number_in(tmp_path / "daemon")])


def test_shared_memory_that_a_probe_leaves_is_removed_by_its_tracker(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    def share() -> None:
        block = shared_memory.SharedMemory(create=True, size=100)
        (tmp_path / block.name).touch()

    assert measure(executor, doing(share)).outcome is Outcome.FITS
    names = {each.name for each in tmp_path.iterdir()}
    assert names
    assert not names & {each.name for each in Path("/dev/shm").iterdir()}


def test_failed_keeps_the_end_of_the_traceback(executor: LocalExecutor) -> None:
    def deep(level: int) -> None:
        if level == 0:
            raise ZeroDivisionError("at the bottom")
        deep(level - 1)

    seen = measure(executor, doing(lambda: deep(30)), number=41)
    assert seen.outcome is Outcome.FAILED
    lines = (seen.reason or "").splitlines()
    assert lines[-1] == "ZeroDivisionError: at the bottom"
    assert 5 < len(lines) <= 12
    assert 'raise ZeroDivisionError("at the bottom")' in log_of(executor, 41)


class Wordless(BaseException):
    def __str__(self) -> str:
        raise Wordless


def in_a_circle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    return first


@pytest.mark.parametrize(
    ("error", "last_line"),
    [
        (lambda: SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt, "KeyboardInterrupt"),
        (lambda: GeneratorExit("no"), "GeneratorExit: no"),
        (Wordless, "Wordless: <exception str() failed>"),
        (lambda: ValueError("x" * 50_000_000), f"ValueError: {'x' * 500}..."),
        (lambda: ValueError("x\n" * 25_000_000), f"ValueError: {'x ' * 250}..."),
        (in_a_circle, "ValueError: first"),
        (lambda: ValueError("\x1b[31m\udc80"), "ValueError: \\x1b[31m\\udc80"),
    ],
    ids=[
        "exit",
        "Ctrl-C",
        "generator",
        "no words",
        "50 MB",
        "many lines",
        "a circle",
        "not printable",
    ],
)
def test_whatever_a_model_raises_is_a_failure_told_in_few_words(
    executor: LocalExecutor, error: Callable[[], BaseException], last_line: str
) -> None:
    def action() -> None:
        raise error()

    seen = measure(executor, doing(action), number=42)
    assert seen.outcome is Outcome.FAILED
    assert (seen.reason or "").splitlines()[-1].endswith(last_line)
    assert len(seen.reason or "") <= 4003
    assert len(log_of(executor, 42)) < 50_000


def close_all() -> None:
    os.closerange(0, 256)


def close_all_and_hang() -> None:
    close_all()
    time.sleep(600)


def write_everywhere() -> None:
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, b"garbage")


def break_the_output() -> None:
    sys.stdout.close()
    sys.stderr = None


def end_at_exit() -> None:
    atexit.register(os._exit, 5)


def ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


def forget_where_it_is() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def limit_itself() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def leave_threads() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()


@pytest.mark.parametrize(
    ("action", "outcome"),
    [
        (close_all, Outcome.FAILED),
        (close_all_and_hang, Outcome.TIMED_OUT),
        (write_everywhere, Outcome.FAILED),
        (lambda: os._exit(0), Outcome.FAILED),
        (lambda: os.kill(os.getpid(), signal.SIGRTMIN + 6), Outcome.FAILED),
        (break_the_output, Outcome.FITS),
        (end_at_exit, Outcome.FITS),
        (ignore_signals, Outcome.FITS),
        (forget_where_it_is, Outcome.FITS),
        (limit_itself, Outcome.FITS),
        (leave_threads, Outcome.FITS),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_model_that_mistreats_its_process_costs_only_itself(
    impatient: LocalExecutor, action: Callable[[], None], outcome: Outcome
) -> None:
    assert measure(impatient, doing(action)).outcome is outcome
    assert measure(impatient, tiny.mlp_workload()).outcome is Outcome.FITS


def test_of_a_model_that_forks_in_every_forward_only_the_first_goes_on(
    executor: LocalExecutor, tmp_path: Path
) -> None:
    """Each copy comes back from the loss as well, and all of them would double with the next one."""

    def fork() -> None:
        with (tmp_path / "forwards").open("a") as file:
            file.write(f"{os.getpid()}\n")
        os.fork()

    assert measure(executor, doing(fork)).outcome is Outcome.FITS
    assert len(set((tmp_path / "forwards").read_text().split())) == 1


@pytest.mark.parametrize(
    ("sent", "outcome", "words"),
    [
        (signal.SIGKILL, Outcome.HOST_OUT_OF_MEMORY, "host memory"),
        (signal.SIGSEGV, Outcome.FAILED, "SIGSEGV"),
        (signal.SIGABRT, Outcome.FAILED, "SIGABRT"),
    ],
)
def test_killed_by_a_signal(
    executor: LocalExecutor, sent: int, outcome: Outcome, words: str
) -> None:
    seen = measure(executor, doing(lambda: os.kill(os.getpid(), sent)))
    assert seen.outcome is outcome
    assert words in (seen.reason or "")


def log_of(executor: LocalExecutor, number: int) -> str:
    return (executor.logs / f"{number:04d}.log").read_text()


@pytest.mark.parametrize(
    ("line", "code", "outcome", "reason"),
    [
        (
            "Error out of memory at line 77 in file /src/csrc/ops.cu",
            1,
            Outcome.OUT_OF_MEMORY,
            "out of memory",
        ),
        (
            "Error invalid argument at line 7 in file /src/csrc/ops.cu",
            1,
            Outcome.FAILED,
            "invalid argument",
        ),
        (
            "Error out of memory at line 77 in file /src/csrc/ops.cu",
            7,
            Outcome.FAILED,
            "exit code 7",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory", 1, Outcome.FAILED, "exit code 1"),
    ],
    ids=["out of memory", "another error", "another way to end", "another's words"],
)
def test_of_a_process_that_bitsandbytes_ended_the_last_line_tells_why(
    executor: LocalExecutor, line: str, code: int, outcome: Outcome, reason: str
) -> None:
    def end() -> None:
        os.write(2, f"Error out of memory at line 1 in file /src/csrc/ops.cu\n{line}\n".encode())
        os._exit(code)

    seen = measure(executor, doing(end), number=53)
    assert seen.outcome is outcome
    assert (seen.reason or "").endswith(reason)


def test_the_last_line_of_an_earlier_probe_in_the_same_log_tells_nothing(
    executor: LocalExecutor,
) -> None:
    (executor.logs / "0054.log").write_text(
        "Error out of memory at line 77 in file /src/csrc/ops.cu\n"
    )
    seen = measure(executor, doing(lambda: os._exit(1)), number=54)
    assert (seen.outcome, seen.reason) == (Outcome.FAILED, "exit code 1")


def test_the_last_line_of_another_function_in_the_same_log_tells_nothing(
    executor: LocalExecutor,
) -> None:
    executor.run(
        lambda _: os.write(2, b"an unrelated line\n"), None, log="shared.log", timeout=60.0
    )
    with pytest.raises(ProbeError, match="exit code 7") as caught:
        executor.run(lambda _: os._exit(7), None, log="shared.log", timeout=60.0)
    assert caught.value.remedy == ""


def test_a_log_that_cannot_be_written_is_told_by_its_name(
    executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000.log").mkdir()
    monkeypatch.setattr(executor, "logs", tmp_path)
    with pytest.raises(IsADirectoryError, match=r"0000\.log"):
        measure(executor, tiny.mlp_workload())


def test_a_folder_of_logs_that_was_deleted_is_made_again(
    executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "logs", tmp_path / "deleted" / "probes")
    assert measure(executor, doing(lambda: sys.stdout.write("something"))).fits
    assert (tmp_path / "deleted" / "probes" / "0000.log").read_text().startswith("something")


def test_a_log_that_is_deleted_before_its_probe_begins_does_not_fail_it(
    executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "logs", tmp_path / "probes")
    send = executor.connection.send

    def delete(job: Any) -> None:
        shutil.rmtree(tmp_path / "probes")
        send(job)

    monkeypatch.setattr(executor.connection, "send", delete)
    assert measure(executor, tiny.mlp_workload()).fits


def test_running_out_counts_only_where_others_left_the_card_what_the_budget_allows(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have come while the probe ran, so that is looked at when it has ended."""
    config = techniques.canonicalize({}, tiny.mlp_workload(), tiny.CPU)
    card = dataclasses.replace(tiny.CPU, device="cuda")
    missed = Measurement(config, Outcome.OUT_OF_MEMORY)
    answers = mock.Mock(side_effect=[missed, ProbeError("others use the card."), missed, None])
    monkeypatch.setattr(executor, "_call", answers)
    with pytest.raises(ProbeError, match="others use the card"):
        executor.measure(tiny.mlp_workload(), Request(config, card, BUDGET, QUICK), number=55)
    assert (
        executor.measure(
            tiny.mlp_workload(), Request(config, card, BUDGET, QUICK), number=55
        ).number
        == 55
    )


def test_output_goes_to_a_log_of_its_own_and_is_never_parsed(
    executor: LocalExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    def chatter() -> None:
        sys.stdout.write("outcome: out_of_memory\n")
        sys.stderr.write("torch.OutOfMemoryError: CUDA out of memory\n")
        os.write(1, b"\x80\x04N.")
        subprocess.run(["echo", "a grandchild"], check=True)

    assert measure(executor, doing(chatter), number=51).outcome is Outcome.FITS
    measure(executor, tiny.mlp_workload(), number=52)
    log = (executor.logs / "0051.log").read_bytes()
    assert all(
        word in log for word in (b"outcome:", b"OutOfMemoryError", b"\x80\x04N.", b"a grandchild")
    )
    assert log_of(executor, 52) == ""
    assert capfd.readouterr() == ("", "")


def test_lambdas_closures_and_local_classes_reach_the_child(executor: LocalExecutor) -> None:
    width = 6

    class Local(nn.Module):
        def __init__(self, out: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, out)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    workload = Workload(
        model=lambda: Local(3), batch=lambda n: {"x": torch.ones(n, width)}, effective_batch_size=2
    )
    assert measure(executor, workload).fits


IN_MAIN = """
import torch
from torch import nn
from autofit.core.workload import Workload

WIDTH = 5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
    def forward(self, x):
        return self.layer(x).square().mean()

def batch(samples):
    return {"x": torch.ones(samples, WIDTH)}

workload = Workload(model=Net, batch=batch, effective_batch_size=2)
"""


def test_what_is_defined_in_main_reaches_the_child(executor: LocalExecutor) -> None:
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(IN_MAIN, notebook)
    assert measure(executor, notebook["workload"]).fits


def test_a_living_batch_reaches_the_child(executor: LocalExecutor) -> None:
    batch = torch.arange(12.0).view(4, 3)
    workload = Workload(
        model=lambda: nn.Linear(3, 1),
        batch=lambda n: batch[:n],
        loss=lambda model, rows: model(rows).sum() * 0 + rows.sum(),
        effective_batch_size=4,
    )
    assert measure(executor, workload).loss == 66.0


def test_what_cannot_be_opened_in_the_child_says_what_to_do(
    executor: LocalExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def batch(samples):\n    return samples\n")
    monkeypatch.syspath_prepend(tmp_path)  # after the zygote has started
    import only_here  # type: ignore[import-not-found]

    workload = Workload(model=tiny.MLP, batch=only_here.batch)
    with pytest.raises(InputError, match=r"cannot be opened in a probe process.*only_here"):
        executor.inspect(workload, "cpu", GIB)
    with pytest.raises(InputError, match="only_here"):
        measure(executor, workload)


class Poisoned(Technique):
    """A technique of the user's own, defined beside their model."""

    name = "poisoned"
    stage = Stage.STEP
    off = False
    values = (False, True)

    def apply(self, setup: Setup, value: Any) -> None:
        setup.warnings.append(f"poisoned is {value}")
        setup.model.out.bias.data.fill_(torch.nan)


def test_a_technique_of_ones_own_works_in_the_child(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(techniques, "_registry", dict(techniques._registry))
    techniques.register(Poisoned())
    seen = measure(executor, tiny.mlp_workload(), {"poisoned": True})
    assert "poisoned is True" in seen.warnings
    assert seen.outcome is Outcome.DIVERGED
    assert measure(executor, tiny.mlp_workload(), {"poisoned": False}).fits


class Operators(TorchDispatchMode):
    """Counts the operators that torch computes in this process."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_the_parent_computes_nothing(executor: LocalExecutor) -> None:
    workload = tiny.transformer_workload()
    with Operators() as operators:
        executor.detect("cpu")
        executor.inspect(workload, "cpu", GIB)
        assert measure(executor, workload).fits
    assert operators.seen == 0
    assert not torch.cuda.is_initialized()


def test_the_first_probe_may_take_twice_as_long(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def call(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return original(*arguments)

    original = executor._call
    monkeypatch.setattr(executor, "_call", call)
    monkeypatch.setattr(executor, "_probes", 0)
    for _ in range(3):
        measure(executor, tiny.mlp_workload())
    assert given == [240, 120, 120]


def test_detects_the_cpu(executor: LocalExecutor) -> None:
    hardware = executor.detect("cpu")
    assert hardware.device == "cpu"
    assert hardware.name
    assert 0 < hardware.host_free_bytes <= hardware.memory_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(executor: LocalExecutor) -> None:
    with pytest.raises(ProbeError, match="no CUDA device"):
        executor.detect("cuda")


def test_a_look_tells_the_traits(executor: LocalExecutor) -> None:
    _, traits = executor.inspect(tiny.transformer_workload(), "cpu", GIB)
    assert (traits.blocks, traits.splits, traits.batch_norm) == (3, True, False)


def test_workloads_are_told_apart_alike_in_every_process(executor: LocalExecutor) -> None:
    living = workload_from(tiny.MLP(), [tiny.mlp_workload().batch(4)], tiny.classify)
    told = [
        executor.inspect(each, "cpu", GIB)[1].fingerprint
        for each in (living, living, tiny.mlp_workload())
    ]
    assert told[0] == told[1] == told[2]
    other = workload_from(
        tiny.MLP(), [tiny.mlp_workload().batch(4)], lambda model, batch: model(batch[0]).mean()
    )
    assert executor.inspect(other, "cpu", GIB)[1].fingerprint not in (None, told[0])


def test_a_look_at_a_factory_that_raises_blames_it(executor: LocalExecutor) -> None:
    def broken() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(
        InputError, match=r"model factory raised ValueError: no such layer \(at .*test_local.py:"
    ):
        executor.inspect(Workload(model=broken, batch=lambda n: torch.ones(n)), "cpu", GIB)


def test_a_look_that_dies_or_hangs_is_a_probe_error(
    executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProbeError, match=r"ended its process: killed by SIGSEGV"):
        executor.inspect(doing(lambda: os.kill(os.getpid(), signal.SIGSEGV)), "cpu", GIB)
    monkeypatch.setattr("autofit.probe.executors.LOOK_SECONDS", 0.5)
    with pytest.raises(ProbeError, match="took more than"):
        executor.inspect(doing(lambda: time.sleep(600)), "cpu", GIB)
    monkeypatch.undo()
    assert executor.inspect(tiny.mlp_workload(), "cpu", GIB)


def test_parametrized_modules_reach_the_child(executor: LocalExecutor) -> None:
    def factory() -> nn.Module:
        model = tiny.MLP()
        linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
        nn.utils.parametrizations.weight_norm(linear)
        return model

    plain, living = tiny.mlp_workload(), factory()
    workload = Workload(
        model=lambda: living, batch=plain.batch, loss=plain.loss, effective_batch_size=4
    )
    assert measure(executor, workload).outcome is Outcome.FITS
