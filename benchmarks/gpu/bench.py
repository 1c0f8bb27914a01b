"""What every stage works with: the store, the time left, one LocalExecutor, the workloads, commands within a time.

This process never opens the device: what needs it runs in children, which end with the time of their stage.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from autofit.core.errors import AutofitError
from autofit.core.hardware import Hardware
from autofit.core.plain import from_plain
from autofit.core.workload import Traits, Workload
from autofit.estimate.operators import MEASURING_SECONDS
from autofit.models import resolve
from autofit.probe import LocalExecutor
from benchmarks.gpu.cases import CARD, SMOKE, Grid
from benchmarks.gpu.store import Store

ROOT = Path(__file__).resolve().parents[2]
# Of one probe, torch.compile included, and where tiny models are rehearsed with; the first one may take twice that.
PROBE_SECONDS, REHEARSAL_SECONDS = 150.0, 30.0
_LEAST_BUDGET = 1  # bytes: leaves no room for trying the loss, which is known of these models


class TimeUp(BaseException):
    """The time of a stage is over. No Exception, so that nothing that records failures takes it for one."""


class LeftOutError(Exception):
    """A stage lacks something; the message says what."""


@dataclass
class Bench:
    """One call of the command."""

    store: Store
    work: Path
    smoke: bool
    deadline: float = 0.0
    _executor: LocalExecutor | None = None
    _workloads: dict[tuple[str, int], Workload] = field(default_factory=dict)

    @property
    def grid(self) -> Grid:
        """The models and levers of this machine."""
        return SMOKE if self.smoke else CARD

    @property
    def device(self) -> str:
        """Where it is measured."""
        return "cpu" if self.smoke else "cuda"

    @property
    def left(self) -> float:
        """Seconds until the end of the stage's time."""
        return self.deadline - time.monotonic()

    @property
    def measuring(self) -> float:
        """Seconds that predictions may call operators for, which they do on a CPU."""
        return 0.3 if self.smoke else MEASURING_SECONDS

    def need(self, seconds: float) -> None:
        """Go no further where less than this is left for what comes next."""
        if self.left < seconds:
            raise TimeUp

    def at_most(self, seconds: float) -> float:
        """The time of one child: no child that hangs takes the whole stage along."""
        return max(1.0, min(self.left, 2 * REHEARSAL_SECONDS if self.smoke else seconds))

    @property
    def executor(self) -> LocalExecutor:
        """The one that measures, started when it is first asked for."""
        if self._executor is None:
            self._executor = LocalExecutor(
                self.logs, REHEARSAL_SECONDS if self.smoke else PROBE_SECONDS
            )
        return self._executor

    def drop_executor(self) -> None:
        """End it: at the end, and where a stage was stopped while it waited for an answer."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    @property
    def logs(self) -> Path:
        """What probes write."""
        logs = self.work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs

    @property
    def hardware(self) -> Hardware:
        """The device, as the first call saw it."""
        known = self.store.get("about")
        assert known, "the runner describes the machine first"
        return from_plain(Hardware, known["hardware"])

    def workload(self, preset: str, effective_batch_size: int) -> Workload:
        """The training of a preset at the grid's sequence length, with what a look at its structure told."""
        key = (preset, effective_batch_size)
        if key not in self._workloads:
            length = self.grid.sequence_length
            plain = resolve(
                preset, sequence_length=length, effective_batch_size=effective_batch_size
            )
            self._workloads[key] = replace(plain, traits=self._traits(preset, plain))
        return self._workloads[key]

    def _traits(self, preset: str, workload: Workload) -> Traits:
        return stored_traits(self.store, preset) or looked_at(
            self.store, self.executor, preset, workload, self.device
        )


def stored_traits(store: Store, preset: str) -> Traits | None:
    """What a look at a preset's structure told; None where there was none yet."""
    known = store.get("traits", preset)
    return None if known is None else Traits(**{**known, "notes": tuple(known["notes"])})


def looked_at(
    store: Store, executor: LocalExecutor, preset: str, workload: Workload, device: str
) -> Traits:
    """Look at a preset's structure, and store what that tells."""
    traits = executor.inspect(workload, device, _LEAST_BUDGET)[1]
    store.add("traits", preset, asdict(traits))
    return traits


@dataclass(frozen=True)
class Ended:
    """A command that ended by itself."""

    code: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The end of what it said, for a row."""
        return "\n".join((self.stderr.strip() or self.stdout.strip()).splitlines()[-12:])


def python(
    arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Ended | None:
    """Run this Python with arguments, and end all that it started; None when the time was up."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, out, err)


def sentence(error: AutofitError | BaseException) -> str:
    """An error as a row keeps it."""
    return str(error) if isinstance(error, AutofitError) else f"{type(error).__name__}: {error}"
