"""Every optimizer, loss and kind of adapter side by side on a CPU: bytes predicted and measured, CPU seconds of a step
as a ratio, the loss after some steps on real text. `python -m benchmarks.levers [--smoke] [--out FILE]`; ten minutes.

Each is built from the same weights, and steps of all of a table alternate, so that what disturbs the machine disturbs
all. Bytes are of two steps, as a probe counts them. What needs a GPU has a row that says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from autofit.core.config import Value
from autofit.core.errors import RefusedError
from autofit.core.workload import Hyperparameters, Workload
from autofit.estimate.estimator import predict
from autofit.hardware.device import detect
from autofit.hardware.tracker import AllocationRecord, StorageTracker
from autofit.setup import Setup
from autofit.techniques import technique_named
from autofit.training.build import build
from autofit.training.step import train_step

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "alice.txt"
LORA: dict[str, Value] = {"lora_rank": 16, "lora_targets": "all-linear"}
LR, SAMPLES = 1e-4, 4
LINEAR = "torch.nn.functional.linear_cross_entropy"


@dataclass(frozen=True)
class Case:
    """One row: its name, its knobs, and whether PyTorch's own linear_cross_entropy takes the place of the model's."""

    name: str
    knobs: Mapping[str, Value]
    linear: bool = False


@dataclass
class Row:
    """What was seen of one case; `needs` where it cannot run here. Seconds are relative to the table's first row."""

    name: str
    needs: str | None = None
    predicted_bytes: int | None = None
    peak_bytes: int | None = None
    ratio: float | None = None
    loss: float | None = None
    seconds: list[float] = field(default_factory=list, repr=False)


def tables(optimizers: Sequence[str]) -> dict[str, list[Case]]:
    """The rows of each table, the one that others are compared with first."""
    of_bf16 = ("adamw", "adamw-master", "adamw-sr", "adamw-8bit-sr")
    return {
        "optimizers, fp32 weights": [
            Case(each, {"optimizer": each}) for each in optimizers if each not in of_bf16[1:]
        ],
        "optimizers, bf16 weights": [
            Case("adamw, bf16-mixed", {"precision": "bf16-mixed"}),
            *(
                Case(each, {"optimizer": each, "precision": "bf16"})
                for each in of_bf16
                if each in optimizers
            ),
        ],
        "losses": [
            *(Case(each, {"loss": each}) for each in ("standard", "chunked", "fused")),
            Case(LINEAR, {}, True),
        ],
        "adapters": [
            Case("lora", LORA),
            Case("lora_rslora", {**LORA, "lora_rslora": True, "lora_alpha": 16.0}),
            Case("lora_plus 16", {**LORA, "lora_plus": 16.0}),
            Case("lora_dora", {**LORA, "lora_dora": True}),
            *(
                Case(f"quantization {each}", {**LORA, "quantization": each})
                for each in ("int8", "nf4", "nf4-dq")
            ),
            Case("head_only", {"head_only": True}),
            Case("all weights", {}),
        ],
    }


def workload_of(*, vocabulary: int, width: int, length: int) -> Workload:
    """A Llama of two blocks that predicts the bytes of a book."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=4, **sizes)
    text = DATA.read_bytes()

    def batch(samples: int, first: int = 0) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(text[first * length : (first + samples) * length])).view(
            samples, length
        )
        return {"input_ids": ids, "labels": ids.clone()}

    return Workload(
        model=lambda: LlamaForCausalLM(config),
        batch=batch,
        effective_batch_size=SAMPLES,
        sequence_length=length,
        unit="tokens",
        task="causal-lm",
    )


def over_hidden_states(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss by PyTorch's own function."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    return functional.linear_cross_entropy(
        hidden, model.lm_head.weight, batch["labels"][:, 1:].flatten()
    )


def setup_of(case: Case, workload: Workload) -> Setup:
    """A run of real weights, the same for all."""
    torch.manual_seed(0)
    given = replace(workload, loss=over_hidden_states) if case.linear else workload
    return build(
        given,
        case.knobs,
        detect("cpu"),
        model=workload.model(),
        hyperparameters=Hyperparameters(lr=LR),
    )


def peak_bytes(case: Case, workload: Workload) -> int:
    """Of building and two steps, with random weights. Compiled code is seen by the allocator alone."""
    compiled = any(technique_named(knob).compiles(value) for knob, value in case.knobs.items())
    record = AllocationRecord() if compiled or case.linear else StorageTracker()
    given = replace(workload, loss=over_hidden_states) if case.linear else workload
    with record, closing(build(given, case.knobs, detect("cpu"))) as setup:
        for _ in range(2):
            train_step(setup, given.batch(SAMPLES))
    return record.peak


def rows_of(cases: Sequence[Case], workload: Workload, *, steps: int) -> list[Row]:
    """One row for each case."""
    rows, setups = [Row(case.name) for case in cases], dict[int, Setup]()
    for number, (case, row) in enumerate(zip(cases, rows, strict=True)):
        try:
            setups[number] = setup_of(case, workload)
        except RefusedError as refused:
            row.needs = str(refused)
            continue
        row.peak_bytes = peak_bytes(case, workload)
        row.predicted_bytes = (
            None if case.linear else predict(workload, case.knobs, detect("cpu")).allocated_bytes
        )
    for step in range(steps):
        batch = workload.batch(SAMPLES, step * SAMPLES)
        for number, setup in setups.items():
            start = time.process_time()
            rows[number].loss = float(train_step(setup, batch))
            rows[number].seconds.append(time.process_time() - start)
    for number, row in enumerate(rows):
        if number in setups:
            # the first ones make state, and compile
            pairs = zip(row.seconds[2:], rows[0].seconds[2:], strict=True)
            row.ratio = statistics.median(own / first for own, first in pairs)
            setups[number].close()
    return rows


def report(found: Mapping[str, Sequence[Row]]) -> str:
    """The tables, in Markdown."""
    lines = []
    for title, rows in found.items():
        lines += [
            f"**{title}**",
            "",
            "| | peak, bytes | predicted | CPU seconds | loss |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in rows:
            if row.needs:
                lines.append(f"| {row.name} | {row.needs} ||||")
                continue
            predicted = (
                "" if row.predicted_bytes is None else f"{row.predicted_bytes - row.peak_bytes:+,}"
            )
            lines.append(
                f"| {row.name} | {row.peak_bytes:,} | {predicted} | x {row.ratio:.2f} | {row.loss:.3f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the figures where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--smoke", action="store_true", help="a small model, nothing compiled, in seconds"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # whose CPU seconds are of the work, not of waiting
    optimizers = [str(each) for each in technique_named("optimizer").values]
    if options.smoke:
        optimizers = [
            each for each in optimizers if not technique_named("optimizer").compiles(each)
        ]
    sizes = (
        {"vocabulary": 256, "width": 32, "length": 16}
        if options.smoke
        else {"vocabulary": 16384, "width": 256}
    )
    workload = workload_of(**{"length": 128, **sizes})
    steps = 3 if options.smoke else options.steps
    found = {
        title: rows_of(cases, workload, steps=steps) for title, cases in tables(optimizers).items()
    }
    print(report(found))
    if options.out:
        plain = {
            title: [asdict(replace(row, seconds=[])) for row in rows]
            for title, rows in found.items()
        }
        options.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
