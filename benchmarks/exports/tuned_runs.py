"""Files of other tools, tuned on this machine and then trained by their own tools under the same budget: `python -m
benchmarks.tuned_runs --tool msswift --python PATH`; some minutes a file and budget.

Each file trains tiny-llama on a CPU. It is tuned and then verified as `autofit tune --verify-in-tool` does it, with
measured steps. Compared are the peak that tuning named and the tool's own, which must not be above the budget.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from autofit.api.tune import tune
from autofit.export.importers.command_line import command_text
from autofit.export.runs import RUNS
from benchmarks.export_runs import BATCH, LENGTH

RESULTS = Path(__file__).parents[1] / "results" / "tuned_runs.json"
BUDGETS = (0.2, 0.5)  # GiB
TRIALS = 6
_MODEL = "tiny-llama"
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
    "model": _MODEL,
    "model_type": "llama",
    "template": "default",
    "max_length": LENGTH,
    "torch_dtype": "float32",
    "fp16": False,
    "adam_beta2": 0.999,
    "dataset": "rows",
}
_FACTORY = {
    **_TRAINER,
    "model_name_or_path": _MODEL,
    "cutoff_len": LENGTH,
    "stage": "pt",
    "do_train": True,
    "dataset": "samples",
    "template": "default",
    "infer_dtype": "float32",
}
_TRL = {
    **_TRAINER,
    "model_name_or_path": _MODEL,
    "dataset_name": "samples",
    "max_length": LENGTH,
    "bf16": False,
}
_AXOLOTL = {
    "base_model": _MODEL,
    "datasets": [{"path": "rows.jsonl", "type": "completion"}],
    "sequence_len": LENGTH,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": BATCH,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 2e-5,
    "lr_scheduler": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "output_dir": "output",
}
_LORA = {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}
# tool -> what people have written
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "axolotl": {
        "full": _AXOLOTL,
        "lora": {
            **_AXOLOTL,
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_target_linear": True,
            # Triton kernels, for cards alone
            "lora_mlp_kernel": False,
            "lora_o_kernel": False,
            "lora_qkv_kernel": False,
        },
        "adafactor": {**_AXOLOTL, "optimizer": "adafactor"},
    },
    "trl": {
        "full": _TRL,
        "lora": {**_TRL, "use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0},
        "bf16": {**_TRL, "dtype": "bfloat16"},
    },
    "transformers": {
        "full": _TRAINER,
        "mixed": {**_TRAINER, "bf16": True},
    },
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
    said_tokens_per_second: float | None = None
    their_tokens_per_second: float | None = None

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


def rows(tool: str, python: str, folder: Path, only: str | None = None) -> Iterator[Row]:
    """Each of the tool's files at each budget, or one of them alone."""
    for name, keys in FILES[tool].items():
        if only not in (None, name):
            continue
        for budget in BUDGETS:
            place = folder / f"{name}-{budget}"
            place.mkdir()
            path = place / RUNS[tool].file
            text = yaml.safe_dump(keys, sort_keys=False)
            if tool == "msswift":
                path = place / "train.sh"
                text = _command(keys)
            path.write_text(text)
            yield _row(tool, python, name, path, budget)


def _command(keys: dict[str, Any]) -> str:
    """A command of ms-swift that learns every token: its `sft` holds no logits of a prompt."""
    words = ["swift", "pt"]
    for name, value in keys.items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return command_text(words)


def _row(tool: str, python: str, name: str, path: Path, budget: float) -> Row:
    given = {"model": _MODEL, "seq_len": LENGTH} if tool == "transformers" else {}
    tuned = tune(
        path,
        **given,
        device="cpu",
        mem=budget,
        trials=TRIALS,
        fast=True,
        out=str(path.parent / "run"),
        verify_in_tool=True,
        tool_python=python,
    )
    in_tool = tuned.in_tool
    assert in_tool and in_tool.said_bytes
    failed = None
    if in_tool.failed:
        failed = in_tool.failed + (in_tool.log.read_text()[-3000:] if in_tool.log else "")
    return Row(
        tool=tool,
        file=name,
        budget_gib=budget,
        changes=dict(tuned.changes),
        said=in_tool.said_bytes,
        theirs=in_tool.peak_bytes,
        failed=failed,
        said_tokens_per_second=in_tool.said_tokens_per_second,
        their_tokens_per_second=in_tool.tokens_per_second,
    )


def given_to(tool: str, folder: Path) -> dict[str, str]:
    """What the environment of a tool holds; `folder` is for a file that LLaMA-Factory needs."""
    if tool != "llamafactory":
        return {}
    # it is imported where no sound is, too, and refuses versions of packages that are not used
    (folder / "torchaudio.py").write_text('__version__ = "0"\n')
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    joined = os.pathsep.join(path for path in paths if path)
    return {"DISABLE_VERSION_CHECK": "1", "PYTHONPATH": joined}


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each file and budget, and keep them beside what is known of other tools."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True, choices=FILES)
    parser.add_argument("--file", help="one of its files; default: all")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with the tool")
    args = parser.parse_args(arguments)

    found = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ.update(given_to(args.tool, place))
        for row in rows(args.tool, args.python, place, args.file):
            found.append(row)
            off = "failed" if row.off is None else f"{row.off:+.2%}"
            print(
                f"{row.tool} {row.file} {row.budget_gib} GiB: said {row.said:,}, {off}; "
                f"{row.changes}{row.failed or ''}",
                flush=True,
            )

    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    again = {(row.tool, row.file) for row in found}
    known = [row for row in known if (row["tool"], row["file"]) not in again]
    RESULTS.write_text(json.dumps({"rows": [*known, *map(asdict, found)]}, indent=1) + "\n")
    right = sum(row.is_right for row in found)
    print(f"{right} of {len(found)} within 2 % and under the budget")
    return 0 if right >= 0.9 * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
