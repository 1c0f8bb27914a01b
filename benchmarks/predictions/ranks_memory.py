"""Predicted against measured memory and collectives of one rank: 24 configs on 2 and 4 gloo ranks of a small Llama, and
what predicting one of 8, 64 and 1,024 ranks takes. `python -m benchmarks.ranks_memory`; 5 minutes on two cores.

Measured is the peak of tensor storage in the third step of each rank, the smallest of three runs: gloo keeps the inputs
of some collectives until a thread of its own is done. Collectives are compared in kind, group and bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Workload
from autofit.distributed.launcher import on_ranks
from autofit.estimate.fake_ranks import collective_of
from autofit.estimate.peak import peak_of
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card, hardware_of
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.models import resolve
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.training.build import build
from autofit.training.step import accumulate, update

RESULTS = Path(__file__).parents[1] / "results" / "ranks_memory.json"
RUNS, STEPS, BATCH = 3, 3, 8
FSDP, DDP, LORA = {"data_parallel": "fsdp"}, {"data_parallel": "ddp"}, {"lora_rank": 4}
HSDP, TENSOR = FSDP | {"data_parallel_replicate": 2}, {"tensor_parallel": 2}
WHOLE, EACH = {"micro_batch_size": 4}, {"micro_batch_size": 2}
FULL = {"activation_checkpointing": "full"}
CONFIGS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, FSDP | WHOLE),
    (2, FSDP | EACH),
    (2, FSDP | WHOLE | {"reshard_after_forward": False}),
    (2, FSDP | WHOLE | {"precision": "bf16"}),
    (2, FSDP | EACH | {"precision": "bf16-mixed"}),
    (2, FSDP | EACH | LORA),
    (2, FSDP | EACH | LORA | {"quantization": "nf4", "precision": "bf16"}),
    (2, FSDP | WHOLE | LORA | {"quantization": "nf4-dq"} | FULL),
    (2, FSDP | EACH | FULL),
    (2, FSDP | EACH | {"activation_checkpointing": "selective"}),
    (2, FSDP | WHOLE | {"optimizer_in_backward": True}),
    (2, FSDP | EACH | {"loss": "chunked"}),
    (2, FSDP | EACH | {"optimizer": "adamw-foreach", "attention": "eager"}),
    (2, DDP | WHOLE),
    (2, DDP | EACH),
    (2, DDP | EACH | LORA | {"quantization": "nf4"}),
    (2, TENSOR | {"micro_batch_size": 8}),
    (2, TENSOR | EACH | FULL | {"optimizer": "adamw-foreach"}),
    (2, FSDP | {"context_parallel": 2, "micro_batch_size": 4}),
    (4, HSDP | {"micro_batch_size": 2}),
    (4, HSDP | {"micro_batch_size": 1} | LORA),
    (4, FSDP | TENSOR | {"micro_batch_size": 4}),
    (4, FSDP | TENSOR | EACH | FULL),
    (4, FSDP | {"context_parallel": 2} | EACH | {"precision": "bf16-mixed"}),
)
LARGE = ("llama-3.1-8b", "llama-3.1-70b")
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# (kind, ranks of the group, bytes, how often) in a step of a micro-batch
Exchanged = list[tuple[str, int, int, int]]


@dataclass(frozen=True)
class Row:
    """One config. `measured`: of each rank."""

    ranks: int
    config: dict[str, Any]
    predicted: int
    measured: tuple[int, ...]
    predicted_collectives: Exchanged
    measured_collectives: Exchanged

    @property
    def error(self) -> int:
        """Bytes predicted too many, of the rank that it is worst of."""
        return max((self.predicted - each for each in self.measured), key=abs)


def workload() -> Workload:
    """What is trained."""
    model = HuggingFaceModel("llama", "causal-lm", _LLAMA, {"kind": "directory", "path": "llama"})
    return huggingface_workload(model, sequence_length=32, effective_batch_size=BATCH)


def hardware(ranks: int) -> Hardware:
    """Some CPUs like this one."""
    return detect("cpu").of_several(ranks)


def predict(ranks: int, config: dict[str, Any]) -> tuple[int, Exchanged]:
    """(the peak, the collectives) by a trace."""
    traced = trace(workload(), config, hardware(ranks))
    forward, micro_batches = (
        traced.start("forward"),
        int(traced.config["gradient_accumulation_steps"] or 1),
    )
    of_step = [each for each in traced.collectives if each.event >= forward]
    counted = (
        counts((each.kind, each.ranks, each.nbytes) for each in of_step)
        if micro_batches == 1
        else []
    )
    return peak_of(traced, hardware(ranks)).nbytes, counted


class _Watch(StorageTracker):
    """The peak of each step, and its collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanged: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        found = None if result is NotImplemented else collective_of(func, args, result)
        if found:
            self.exchanged.append((found.kind, found.ranks, found.nbytes))
        return result


def measure(_: Any, ranks: int) -> list[list[tuple[str, list[int], Exchanged]]]:
    """On a rank: of every config and run, the peak of each rank and the collectives of this one."""
    chosen = [config for world, config in CONFIGS if world == ranks]
    return [[measured(ranks, config) for _ in range(RUNS)] for config in chosen]


def measured(ranks: int, config: dict[str, Any]) -> tuple[str, list[int], Exchanged]:
    """(the config, the peak of each rank, the collectives of this one's last step)."""
    watch, given = _Watch(), workload()
    with watch:
        setup = build(given, config, hardware(ranks))
        batch = given.batch(BATCH // setup.ranks.layout.dp_degree)
        for _ in range(STEPS):
            watch.exchanged = []
            accumulate(setup, batch)
            update(setup)
    setup.close()
    exchanged = (
        counts(watch.exchanged) if setup.config["gradient_accumulation_steps"] in (1, None) else []
    )
    peaks = [int(each) for each in setup.ranks.everywhere(float(watch.peak))[0]]
    return json.dumps(config), peaks, exchanged


def counts(exchanged: Iterable[tuple[str, int, int]]) -> Exchanged:
    """How often each was exchanged."""
    return [(*each, count) for each, count in sorted(Counter(exchanged).items())]


def large(model: str, ranks: int) -> tuple[float, Trace]:
    """(seconds to predict, the trace) of one of so many ranks: fsdp of all weights in bf16, on H100 cards."""
    target = hardware_of(card("h100")).of_several(8, max(1, ranks // 8))
    given = resolve(model, sequence_length=2048, effective_batch_size=ranks)
    config = FSDP | FULL | {"precision": "bf16", "micro_batch_size": 1}
    start = time.monotonic()
    traced = trace(given, config, target)
    return time.monotonic() - start, traced


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    rows = []
    for ranks in (2, 4):
        chosen = [config for world, config in CONFIGS if world == ranks]
        for config, runs in zip(
            chosen, on_ranks(measure, ranks, count=ranks, device="cpu"), strict=True
        ):
            peaks = tuple(min(each) for each in zip(*(peaks for _, peaks, _ in runs), strict=True))
            predicted, collectives = predict(ranks, config)
            row = Row(ranks, config, predicted, peaks, collectives, runs[0][2])
            rows.append(row)
            same = (
                "same collectives"
                if row.predicted_collectives == row.measured_collectives
                else "OTHER COLLECTIVES"
            )
            print(
                f"{ranks} ranks {row.predicted:10,} predicted {row.error:+8,}  {same}  {json.dumps(config)}"
            )
    scales = []
    for model in LARGE:
        for ranks in (8, 64, 1024):
            seconds, traced = large(model, ranks)
            target = hardware_of(card("h100")).of_several(8, max(1, ranks // 8))
            peak = peak_of(traced, target)
            scales.append(
                {"model": model, "ranks": ranks, "seconds": seconds, "gib": peak.nbytes / GIB}
            )
            print(
                f"{model} on {ranks:5} ranks: {peak.nbytes / GIB:6.2f} GiB each, predicted in {seconds:.1f} s"
            )
    figures = {"rows": [asdict(row) | {"error": row.error} for row in rows], "scales": scales}
    given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    # ranks import what they call by its module's name
    from benchmarks.ranks_memory import main as run

    raise SystemExit(run())
