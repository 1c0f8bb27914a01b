"""Files of other tools, tuned on this machine and then trained by their own tools under the same budget: `python -m
benchmarks.tuned_runs --tool msswift --python PATH`; a minute a file and budget.

Each file trains tiny-llama on a CPU. It is tuned as `autofit tune` does it, with measured steps; then its tool trains
three steps from what was written. Compared are the peak that tuning named and the tool's own, which must not be above
the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autofit.api.tune import save, tune
from autofit.export.tools import tool_named
from benchmarks.export_runs import BATCH, LENGTH, Stage, canonical, staged, taken
from benchmarks.tool_runs import RUNS

RESULTS = Path(__file__).parents[1] / "results" / "tuned_runs.json"
BUDGETS = (0.2, 0.5)  # GiB
TRIALS = 12
_TRAINER: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": BATCH,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "output_dir": "output",
}
_SWIFT = {
    **_TRAINER,
    "max_length": LENGTH,
    "torch_dtype": "float32",
    "fp16": False,
    "adam_beta2": 0.999,
    "dataset": "rows",
}
_FACTORY = {
    **_TRAINER,
    "cutoff_len": LENGTH,
    "stage": "pt",
    "do_train": True,
    "dataset": "samples",
    "template": "default",
    "infer_dtype": "float32",
}
_LORA = {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}
# tool -> what people have written
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "msswift": {
        "full": {**_SWIFT, "tuner_type": "full"},
        "lora": {**_SWIFT, **_LORA, "tuner_type": "lora"},
        "bf16": {**_SWIFT, "tuner_type": "full", "torch_dtype": "bfloat16"},
    },
    "llamafactory": {
        "full": {**_FACTORY, "finetuning_type": "full"},
        "mixed": {**_FACTORY, "finetuning_type": "full", "bf16": True},
    },
}


@dataclass(frozen=True)
class Row:
    """One file at one budget: the peaks in bytes that tuning named and that the tool had."""

    tool: str
    file: str
    budget_gib: float
    changes: dict[str, Any]
    said: int
    theirs: int | None = None
    failed: str | None = None

    @property
    def off(self) -> float | None:
        """How far the tool's peak is from what was said, as a share of it."""
        return None if self.theirs is None else self.theirs / self.said - 1

    @property
    def is_right(self) -> bool:
        """Within 2 %, and not above the budget."""
        return (
            self.off is not None
            and self.theirs is not None
            and abs(self.off) <= 0.02
            and self.theirs <= self.budget_gib * 2**30
        )


def rows(tool: str, python: str, folder: Path) -> Iterator[Row]:
    """Each of the tool's files at each budget."""
    stage = staged(folder / "stage")
    for name, keys in FILES[tool].items():
        for budget in BUDGETS:
            place = folder / f"{name}-{budget}"
            place.mkdir()
            yield _row(tool, python, stage, name, keys, budget, place)


def _row(
    tool: str,
    python: str,
    stage: Stage,
    name: str,
    keys: dict[str, Any],
    budget: float,
    place: Path,
) -> Row:
    key = "model" if tool == "msswift" else "model_name_or_path"
    original = place / "original.yaml"
    original.write_text(yaml.safe_dump({key: str(stage.weights), **keys}, sort_keys=False))
    tuned = tune(original, device="cpu", mem=budget, trials=TRIALS, out=str(place / "run"))
    best = tuned.result.best
    assert best and best.peak_bytes
    save(tuned, place / f"{tool_named(tool).name}.yaml")

    row = Row(tool, name, budget, dict(tuned.changes), best.peak_bytes.allocated)
    config = canonical(stage, tuned.result.config or {})
    try:
        command = [python, *RUNS[tool].command(stage, config, place)]
        theirs = taken(command, place, RUNS[tool].environment).peak_bytes
    except RuntimeError as error:
        return Row(**{**asdict(row), "failed": str(error)})
    return Row(**{**asdict(row), "theirs": theirs})


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each file and budget, and keep them beside what is known of other tools."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True, choices=FILES)
    parser.add_argument("--python", default=sys.executable, help="the interpreter with the tool")
    args = parser.parse_args(arguments)

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(args.tool, args.python, Path(folder)):
            found.append(row)
            off = "failed" if row.off is None else f"{row.off:+.2%}"
            print(
                f"{row.tool} {row.file} {row.budget_gib} GiB: said {row.said:,}, {off}; "
                f"{row.changes}{row.failed or ''}",
                flush=True,
            )

    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    known = [row for row in known if row["tool"] != args.tool]
    RESULTS.write_text(json.dumps({"rows": [*known, *map(asdict, found)]}, indent=1) + "\n")
    right = sum(row.is_right for row in found)
    print(f"{right} of {len(found)} within 2 % and under the budget")
    return 0 if right >= 0.9 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
