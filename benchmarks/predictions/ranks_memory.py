"""Predicted against measured memory and collectives of ranks: `python -m benchmarks.ranks_memory`.

A small Llama on 2 and 4 gloo ranks: 24 configs that divide weights, layers, tokens or samples, and
28 with the stages of a pipeline, which need different memory. Then what it takes to predict one of
8, 64 and 1,024 ranks. Five minutes on two cores.

Measured is the peak of tensor storage in the third step of each rank, the smallest of three runs:
gloo keeps the inputs of some collectives until a thread of its own is done. Collectives are
compared in kind, group and bytes, where a step has one micro-batch and no stages.
"""

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
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.step import accumulate, update

RESULTS = Path(__file__).parents[1] / "results" / "ranks_memory.json"
RUNS = 3
STEPS = 3
BATCH = 8

FSDP = {"data_parallel": "fsdp"}
DDP = {"data_parallel": "ddp"}
HSDP = FSDP | {"data_parallel_replicate": 2}
TENSOR = {"tensor_parallel": 2}
TWO_STAGES = {"pipeline_parallel": 2}
FOUR_STAGES = {"pipeline_parallel": 4}
GPIPE = {"pipeline_schedule": "gpipe"}
INTERLEAVED = {"pipeline_schedule": "interleaved"}

LORA = {"lora_rank": 4}
QLORA = LORA | {"quantization": "nf4", "precision": "bf16"}
FULL = {"activation_checkpointing": "full"}
MIXED = {"precision": "bf16-mixed"}

ONE = {"micro_batch_size": 1}
EACH = {"micro_batch_size": 2}
WHOLE = {"micro_batch_size": 4}
ALL = {"micro_batch_size": 8}

Knobs = dict[str, Any]
CONFIGS: tuple[tuple[int, Knobs], ...] = (
    (2, FSDP | WHOLE),
    (2, FSDP | EACH),
    (2, FSDP | WHOLE | {"reshard_after_forward": False}),
    (2, FSDP | WHOLE | {"precision": "bf16"}),
    (2, FSDP | EACH | MIXED),
    (2, FSDP | EACH | LORA),
    (2, FSDP | EACH | QLORA),
    (2, FSDP | WHOLE | LORA | {"quantization": "nf4-dq"} | FULL),
    (2, FSDP | EACH | FULL),
    (2, FSDP | EACH | {"activation_checkpointing": "selective"}),
    (2, FSDP | WHOLE | {"optimizer_in_backward": True}),
    (2, FSDP | EACH | {"loss": "chunked"}),
    (2, FSDP | EACH | {"optimizer": "adamw-foreach", "attention": "eager"}),
    (2, DDP | WHOLE),
    (2, DDP | EACH),
    (2, DDP | EACH | LORA | {"quantization": "nf4"}),
    (2, TENSOR | ALL),
    (2, TENSOR | EACH | FULL | {"optimizer": "adamw-foreach"}),
    (2, FSDP | {"context_parallel": 2} | WHOLE),
    (4, HSDP | EACH),
    (4, HSDP | ONE | LORA),
    (4, FSDP | TENSOR | WHOLE),
    (4, FSDP | TENSOR | EACH | FULL),
    (4, FSDP | {"context_parallel": 2} | EACH | MIXED),
    (2, TWO_STAGES | ONE),
    (2, TWO_STAGES | EACH),
    (2, TWO_STAGES | WHOLE),
    (2, TWO_STAGES | ALL),
    (2, TWO_STAGES | ONE | GPIPE),
    (2, TWO_STAGES | EACH | GPIPE | FULL),
    (2, TWO_STAGES | ONE | FULL),
    (2, TWO_STAGES | ONE | {"activation_checkpointing": "selective"}),
    (2, TWO_STAGES | EACH | {"precision": "bf16"}),
    (2, TWO_STAGES | ONE | MIXED),
    (2, TWO_STAGES | ONE | LORA),
    (2, TWO_STAGES | EACH | QLORA),
    (2, TWO_STAGES | ONE | LORA | {"quantization": "nf4-dq"} | FULL | MIXED),
    (2, TWO_STAGES | EACH | LORA | {"quantization": "int8"}),
    (2, TWO_STAGES | EACH | {"loss": "chunked"}),
    (2, TWO_STAGES | ONE | {"optimizer": "adamw-foreach", "attention": "eager"}),
    (2, TWO_STAGES | WHOLE | QLORA | GPIPE),
    (2, TWO_STAGES | ONE | INTERLEAVED),
    (2, TWO_STAGES | EACH | INTERLEAVED | QLORA | FULL),
    (4, TWO_STAGES | DDP | ONE),
    (4, TWO_STAGES | DDP | EACH | LORA),
    (4, TWO_STAGES | FSDP | ONE),
    (4, TWO_STAGES | FSDP | EACH | FULL | MIXED),
    (4, TWO_STAGES | FSDP | ONE | QLORA),
    (4, TWO_STAGES | FSDP | ONE | INTERLEAVED | MIXED),
    (4, TWO_STAGES | DDP | ONE | INTERLEAVED | LORA),
    (4, FOUR_STAGES | ONE),
    (4, FOUR_STAGES | EACH | GPIPE | MIXED),
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
    """One config, and the bytes of each rank."""

    ranks: int
    config: Knobs
    predicted: tuple[int, ...]
    measured: tuple[int, ...]
    predicted_collectives: Exchanged
    measured_collectives: Exchanged

    @property
    def error(self) -> int:
        """Bytes predicted too many, of the rank that it is worst of."""
        errors = [
            predicted - measured
            for predicted, measured in zip(self.predicted, self.measured, strict=True)
        ]

        return max(errors, key=abs)


def workload() -> Workload:
    """What is trained."""
    model = HuggingFaceModel("llama", "causal-lm", _LLAMA, {"kind": "directory", "path": "llama"})
    return huggingface_workload(model, sequence_length=32, effective_batch_size=BATCH)


def hardware(ranks: int) -> Hardware:
    """Some CPUs like this one."""
    return detect("cpu").of_several(ranks)


def predict(ranks: int, config: Knobs) -> tuple[tuple[int, ...], Exchanged]:
    """(the peak of each rank, the collectives) by a trace."""
    traced = trace(workload(), config, hardware(ranks))
    stages = traced.stages or (traced,)
    of_stages = [peak_of(stage, hardware(ranks)).nbytes for stage in stages]

    ranks_of_stage = ranks // len(stages)
    peaks = tuple(of_stages[rank // ranks_of_stage] for rank in range(ranks))
    if traced.stages or traced.config["gradient_accumulation_steps"] not in (1, None):
        return peaks, []

    forward = traced.start("forward")
    of_step = [exchange for exchange in traced.collectives if exchange.event >= forward]

    return peaks, counts((one.kind, one.ranks, one.nbytes) for one in of_step)


class _Watch(StorageTracker):
    """The peak of each step, and its collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanged: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result

        found = collective_of(func, args, result)
        if found:
            self.exchanged.append((found.kind, found.ranks, found.nbytes))

        return result


def measure(_: Any, ranks: int) -> list[list[tuple[list[int], Exchanged]]]:
    """On a rank: of every config and run, the peak of each rank and this one's collectives."""
    chosen = [config for world, config in CONFIGS if world == ranks]
    return [[measured(ranks, config) for _ in range(RUNS)] for config in chosen]


def measured(ranks: int, config: Knobs) -> tuple[list[int], Exchanged]:
    """(the peak of each rank, the collectives of this one's last step)."""
    watch = _Watch()
    given = workload()
    with watch:
        setup = build(given, config, hardware(ranks))
        batch = given.batch(BATCH // setup.ranks.layout.dp_degree)
        for _ in range(STEPS):
            watch.exchanged = []
            accumulate(setup, batch)
            update(setup)

    setup.close()
    peaks = [int(peak) for peak in setup.ranks.everywhere(float(watch.peak))[0]]

    return peaks, counts(watch.exchanged) if _tells_collectives(setup) else []


def _tells_collectives(setup: Setup) -> bool:
    """Whether a step has one micro-batch and no stages."""
    of_one = setup.config["gradient_accumulation_steps"] in (1, None)
    return of_one and setup.ranks.layout.pipeline == 1


def counts(exchanged: Iterable[tuple[str, int, int]]) -> Exchanged:
    """How often each was exchanged."""
    return [(*kind, count) for kind, count in sorted(Counter(exchanged).items())]


def large(model: str, ranks: int) -> tuple[float, Trace]:
    """(seconds to predict, the trace) of one of so many ranks with FSDP, in bf16 on H100 cards."""
    target = hardware_of(card("h100")).of_several(8, max(1, ranks // 8))
    given = resolve(model, sequence_length=2048, effective_batch_size=ranks)
    config = FSDP | FULL | ONE | {"precision": "bf16"}

    start = time.monotonic()
    traced = trace(given, config, target)

    return time.monotonic() - start, traced


def rows_of(ranks: int) -> list[Row]:
    """Every config of so many ranks, measured and predicted."""
    chosen = [config for world, config in CONFIGS if world == ranks]
    by_config = on_ranks(measure, ranks, count=ranks, device="cpu")

    rows = []
    for config, runs in zip(chosen, by_config, strict=True):
        least = zip(*(peaks for peaks, _ in runs), strict=True)
        predicted, collectives = predict(ranks, config)
        row = Row(
            ranks,
            config,
            predicted,
            tuple(min(peaks) for peaks in least),
            collectives,
            runs[0][1],
        )
        rows.append(row)

        same = row.predicted_collectives == row.measured_collectives
        print(
            f"{ranks} ranks {max(row.predicted):10,} predicted {row.error:+8,}  "
            f"{'same' if same else 'OTHER'} collectives  {json.dumps(config)}",
            flush=True,
        )

    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)

    rows = [row for ranks in (2, 4) for row in rows_of(ranks)]

    scales = []
    for model in LARGE:
        for ranks in (8, 64, 1024):
            seconds, traced = large(model, ranks)
            target = hardware_of(card("h100")).of_several(8, max(1, ranks // 8))
            gib = peak_of(traced, target).nbytes / GIB
            scales.append({"model": model, "ranks": ranks, "seconds": seconds, "gib": gib})
            print(
                f"{model} on {ranks:5} ranks: {gib:6.2f} GiB each, predicted in {seconds:.1f} s",
                flush=True,
            )

    figures = {
        "rows": [asdict(row) | {"error": row.error} for row in rows],
        "scales": scales,
    }
    given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    return 0


if __name__ == "__main__":
    # ranks import what they call by its module's name
    from benchmarks.predictions.ranks_memory import main as run

    raise SystemExit(run())
