"""Predicted against measured memory of real training steps on the CPU, over models and configs.
`python -m benchmarks.estimate_memory [--models NAME ...] [--only TEXT] [--fresh | --again]`; 20 minutes on two cores.

Two peaks are measured from building the model to the end of the second step: the one a probe reports (of tensors), and
the one that PyTorch's allocator reports to the profiler. What the allocator has more is scratch memory inside kernels,
which neither a probe nor a prediction counts. Each run has its own process, forked from one that has computed nothing.
Figures are saved as they come, and a run continues where the last one ended. Configs that compile are listed apart:
their prediction is of the eager code, and their probes read the allocator.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autofit.core.errors import AutofitError, ProbeError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.data.batch import map_tensors
from autofit.estimate.peak import peak_of
from autofit.estimate.trace import trace
from autofit.hardware.device import detect
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.probe import LocalExecutor
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.inspect import inspect_workload
from autofit.training.replay import has_representations
from autofit.training.step import accumulate, update
from benchmarks.memory_models import MODELS
from benchmarks.small_denoisers import DENOISERS

CASES = {**MODELS, **DENOISERS}
RESULTS = Path(__file__).parents[1] / "results" / "estimate_memory.json"
# What every knob is tried at; a knob not listed has no other value on a CPU.
VALUES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "bf16-mixed"),
    "micro_batch_size": (None, 1, 2, 4),
    "activation_checkpointing": ("none", "selective", "alternate", "full"),
    "lora_rank": (0, 8, 64),
    "lora_targets": (None, "attention", "all-linear", "all-linear+head"),
    "quantization": ("none", "int8", "nf4", "nf4-dq"),
    "optimizer": ("adamw", "adamw-foreach", "adamw-8bit", "adafactor", "sgd"),
    "optimizer_in_backward": (False, True),
    "attention": ("sdpa", "eager"),
    "loss": ("standard", "chunked"),
    "reference": ("resident", "adapter-off", "precomputed"),
}
# what a value needs to mean something
BESIDE: dict[str, dict[str, Any]] = {
    "lora_targets": {"lora_rank": 8},
    "quantization": {"lora_rank": 8},
    "reference": {"lora_rank": 8},
}
COMPILED: tuple[dict[str, Any], ...] = (
    {"compile": "default"},
    {"compile": "default", "precision": "bf16-mixed", "micro_batch_size": 2},
    {"compile": "default", "precision": "bf16", "lora_rank": 8},
    {"optimizer": "adamw-4bit"},
    {"optimizer": "adamw-fp8", "precision": "bf16"},
)
_RUN_SECONDS = 3600.0  # at most
CONFIGS = 64  # of each model: every value alone, then drawn combinations


@dataclass(frozen=True)
class Row:
    """One config of one model. `reason` says why a figure is missing."""

    model: str
    config: str
    compiled: bool = False
    predicted: int | None = None
    probed: int | None = None
    allocated: int | None = None
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """Relative to the probe's peak; positive when too much was predicted."""
        return self.predicted / self.probed - 1 if self.predicted and self.probed else None

    @property
    def scratch(self) -> float | None:
        """What the allocator gave beyond the probe's peak, relative to it."""
        return self.allocated / self.probed - 1 if self.allocated and self.probed else None


def written(knobs: dict[str, Any]) -> str:
    """A config as text: the key of its row."""
    return json.dumps(knobs, sort_keys=True)


def configs_of(model: str, *, count: int, seed: int) -> list[str]:
    """The configs of a model that are not refused, each once however it is written; those that compile come last."""
    hardware = detect("cpu")
    workload = CASES[model].workload(model)
    workload = replace(
        workload, traits=inspect_workload(workload, hardware, hardware.host_free_bytes)
    )
    plain: list[dict[str, Any]] = []
    taken = set()
    for knobs in _candidates(seed):
        if "reference" in knobs and not workload.frozen:
            continue
        config = canonicalize(knobs, workload, hardware)
        if config not in taken and not refuse(config, workload, hardware):
            taken.add(config)
            plain.append(knobs)
        if len(plain) == count:
            break
    compiled = [
        each
        for each in COMPILED
        if not refuse(canonicalize(each, workload, hardware), workload, hardware)
    ]
    return [written(each) for each in (*plain, *compiled)]


def _candidates(seed: int) -> Iterable[dict[str, Any]]:
    yield {}
    for knob, (_, *values) in VALUES.items():
        for value in values:
            yield {knob: value} | BESIDE.get(knob, {})
    draw = random.Random(seed)
    for _ in range(10_000):  # far more than are needed: most are refused for models of few knobs
        drawn = {knob: draw.choice(values) for knob, values in VALUES.items()}
        yield {knob: value for knob, value in drawn.items() if value != VALUES[knob][0]}


def predict(model: str, config: str) -> int:
    """The peak by the trace."""
    hardware = detect("cpu")
    return peak_of(
        trace(CASES[model].workload(model), json.loads(config), hardware), hardware
    ).nbytes


def measure(model: str, config: str) -> tuple[int, int]:
    """(the peak that a probe reports, the peak by the allocator's events) of two real steps of two micro-batches."""
    return peaks(
        CASES[model].workload(model), json.loads(config), detect("cpu"), compiled=compiles(config)
    )


def peaks(
    workload: Workload, knobs: dict[str, Any], hardware: Hardware, *, compiled: bool = False
) -> tuple[int, int]:
    """Build, and do what a probe does to see the peak; a tracker would prevent compilation."""
    record, tracker = AllocationRecord(), StorageTracker()
    with record, nullcontext() if compiled else tracker:
        setup = build(workload, knobs, hardware)
        batch = workload.batch(workload.effective_batch_size)
        samples = 2 * setup.micro_batch_size
        if has_representations(workload.loss):  # which are of the whole batch
            samples = workload.effective_batch_size
        part = map_tensors(batch, lambda tensor: tensor[:samples] if tensor.dim() else tensor)
        for _ in range(2):
            accumulate(setup, part)
            update(setup)
    setup.close()
    return record.peak if compiled else tracker.peak, record.peak


def compiles(config: str) -> bool:
    """Whether a run of the config waits for a compiler."""
    return any(technique_named(knob).compiles(value) for knob, value in json.loads(config).items())


def listed(_: None, model: str, count: int, seed: int) -> list[str]:
    """In a child: the configs of a model."""
    return configs_of(model, count=count, seed=seed)


def tried(
    _: None, function: Callable[[str, str], Any], model: str, config: str
) -> tuple[Any, str | None]:
    """In a child: figures, or why there are none. Whatever a run ends with is a result of the benchmark."""
    try:
        return function(model, config), None
    except AutofitError as error:
        return None, f"{function.__name__}: {error}"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"{function.__name__}: {type(error).__name__}: {first[:200]}"


def _figures(
    executor: LocalExecutor, function: Callable[[str, str], Any], row: Row
) -> tuple[Any, str | None]:
    try:
        return executor.run(  # type: ignore[no-any-return]
            tried, None, function, row.model, row.config, log="run.log", timeout=_RUN_SECONDS
        )
    except ProbeError as error:
        return None, f"{function.__name__}: {error}"


def completed(executor: LocalExecutor, row: Row, *, again: bool) -> Row:
    """The row with the figures it lacks; `again`: and its prediction made anew."""
    reasons = []
    if row.predicted is None or again:
        predicted, reason = _figures(executor, predict, row)
        row = replace(row, predicted=predicted)
        reasons.append(reason)
    if row.probed is None:
        measured, reason = _figures(executor, measure, row)
        row = replace(row, probed=measured and measured[0], allocated=measured and measured[1])
        reasons.append(reason)
    return replace(row, reason="; ".join(each for each in reasons if each) or None)


@dataclass(frozen=True)
class Summary:
    """Errors without their sign, of several rows; and the median and most of their kernels' scratch memory."""

    rows: int
    median: float
    worst: float
    scratch_median: float = 0.0
    scratch_worst: float = 0.0


def summary_of(rows: Iterable[Row]) -> Summary | None:
    """None where no row has both figures."""
    complete = [row for row in rows if row.error is not None]
    errors = [abs(row.error or 0.0) for row in complete]
    scratch = [row.scratch or 0.0 for row in complete]
    if not errors:
        return None
    return Summary(
        len(errors),
        statistics.median(errors),
        max(errors),
        statistics.median(scratch),
        max(scratch),
    )


def summaries(rows: list[Row]) -> dict[str, Summary]:
    """Of all rows, of each model, of each value of each knob; of those that compile."""
    plain = [row for row in rows if not row.compiled]
    groups = {"all": plain, "compiled": [row for row in rows if row.compiled]}
    groups |= {model: [row for row in plain if row.model == model] for model in CASES}
    for knob, (_, *values) in VALUES.items():
        for value in values:
            groups[f"{knob}={value}"] = [
                row for row in plain if json.loads(row.config).get(knob) == value
            ]
    found = {name: summary_of(group) for name, group in groups.items()}
    return {name: each for name, each in found.items() if each}


def read(path: Path) -> dict[tuple[str, str], Row]:
    """The rows of an earlier run."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    kept = [Row(**{name: row[name] for name in Row.__dataclass_fields__}) for row in rows]
    return {(row.model, row.config): row for row in kept}


def write(path: Path, rows: list[Row]) -> None:
    """All figures, and what they come to."""
    figures = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "summaries": {name: asdict(each) for name, each in summaries(rows).items()},
        "rows": [asdict(row) | {"error": row.error, "scratch": row.scratch} for row in rows],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def show(row: Row) -> str:
    """One line."""
    figures = (row.predicted, row.probed, row.allocated)
    sizes = " ".join("         -" if each is None else f"{each / 2**20:10.3f}" for each in figures)
    error, scratch = ("" if each is None else f"{each:+.3%}" for each in (row.error, row.scratch))
    return f"{row.model:10} {sizes} MiB {error:>9} {scratch:>9}  {row.config} {row.reason or ''}".rstrip()


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=CASES,
        default=list(MODELS),
        help="default: all but the small denoisers",
    )
    parser.add_argument("--only", default="", help="only configs that hold this text")
    parser.add_argument(
        "--eager", action="store_true", help="leave out what compiles, which takes minutes"
    )
    parser.add_argument("--fresh", action="store_true", help="measure and predict all anew")
    parser.add_argument(
        "--again", action="store_true", help="predict anew what was measured before"
    )
    parser.add_argument(
        "--configs", type=int, default=CONFIGS, help="of each model, without those that compile"
    )
    parser.add_argument("--seed", type=int, default=0, help="which combinations")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    rows = {} if given.fresh else read(given.out)
    with LocalExecutor() as executor:
        for model in given.models:
            asked = (model, given.configs, given.seed)
            for config in executor.run(listed, None, *asked, log="run.log", timeout=_RUN_SECONDS):
                if given.only not in config or (given.eager and compiles(config)):
                    continue
                row = rows.get((model, config), Row(model, config, compiles(config)))
                rows[model, config] = completed(executor, row, again=given.again)
                print(show(rows[model, config]), flush=True)
                write(given.out, list(rows.values()))
    for name, each in summaries(list(rows.values())).items():
        off = f"off by {each.median:.4%} (median), {each.worst:.4%} (worst)"
        scratch = f"scratch in kernels {each.scratch_median:.4%}, {each.scratch_worst:.3%}"
        print(f"{name:40} {each.rows:4} configs: {off}; {scratch}")
    return 0


if __name__ == "__main__":
    # child processes import what they call by its module's name
    from benchmarks.estimate_memory import main as run

    raise SystemExit(run())
