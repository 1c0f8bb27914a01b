"""What narrowing a space for many devices costs: the best config it leaves against the best of a space predicted whole.

`python -m benchmarks.narrowing [--model llama-3.1-8b] [--gpu h100] [--devices 8] [--gpu-mem 20 30 40 80] [--out FILE]`

The space is small enough to predict all of it, every way to divide the devices beside the levers that interact with it.
Then it is narrowed as if it were not, within each budget, and the fastest config that fits is compared by tier.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.hardware import GIB
from autofit.core.options import SearchOptions
from autofit.core.result import tier
from autofit.estimate.figures import predict_all
from autofit.models import resolve
from autofit.search.enumeration import Enumeration
from autofit.tuning import narrowing
from autofit.tuning.space import space_for
from benchmarks.estimate_space import hardware_of

SPACE: Mapping[str, tuple[Value, ...]] = {
    "precision": ("bf16", "bf16-mixed"),
    "activation_checkpointing": ("full", "selective", "none"),
    "lora_rank": (16, 0),
    "lora_targets": ("all-linear",),
    "quantization": ("nf4", "none"),
    "optimizer": ("adamw-8bit", "adamw"),
    "loss": ("chunked", "standard"),
    "fsdp_offload": ("cpu", "none"),
}
_FREE = ("micro_batch_size", *narrowing._LAYOUT)
_NARROWED_BEYOND = 10  # configs, so that it is narrowed

Figures = Mapping[Config, tuple[float, float]]  # bytes and seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the whole space once, narrow it within each budget, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--gpu-mem", type=float, nargs="+", default=[20.0, 30.0, 40.0, 80.0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    rows = compared(given.model, given.gpu, given.devices, given.gpu_mem)
    for row in rows:
        print(
            "{gpu_mem:g} GiB, {tier}: {slower:.2%} slower, {asked} of {configs} configs predicted".format(
                **row
            )
        )
    if given.out:
        given.out.write_text(
            json.dumps({**vars(given), "out": None, "rows": rows}, indent=1) + "\n",
            encoding="utf-8",
        )


def compared(model: str, gpu: str, devices: int, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """By budget and tier how much slower the best config is of what narrowing leaves, as a share."""
    hardware = hardware_of(gpu).of_several(devices)
    workload = resolve(model, effective_batch_size=32)
    space = space_for(SearchOptions(space="everything"), workload, hardware)
    knobs = SPACE | {knob: values for knob, values in space.knobs.items() if knob in _FREE}
    constraints = techniques.constraints(workload, hardware)
    configs = Enumeration(knobs, constraints).configs()
    start = time.monotonic()
    predicted = predict_all(workload, hardware, configs, processes=None)
    figures = dict(zip(configs, zip(*predicted, strict=True), strict=True))
    print(f"{len(configs):,} configs predicted in {time.monotonic() - start:.0f} s", flush=True)
    rows = []
    for budget in budgets:
        asked: set[Config] = set()

        def predict(
            some: Sequence[Config], asked: set[Config] = asked
        ) -> tuple[list[float], list[float]]:
            asked.update(some)
            return [figures[each][0] for each in some], [figures[each][1] for each in some]

        small = type(space)(space.name, space.description, dict(knobs))
        with mock.patch.object(narrowing, "_WHOLE", _NARROWED_BEYOND):
            looked_at = narrowing.Narrowing(workload, hardware, budget * GIB, predict, seed=0)
            left, _ = looked_at.narrowed(small)
        found = Enumeration(left.knobs, constraints).configs()
        whole, narrow = _best(configs, figures, budget * GIB), _best(found, figures, budget * GIB)
        of = {"gpu_mem": budget, "configs": len(configs), "asked": len(asked | set(found))}
        rows += [
            of | {"tier": name, "slower": narrow[name] / best - 1} for name, best in whole.items()
        ]
    return rows


def _best(configs: Sequence[Config], figures: Figures, cap_bytes: float) -> dict[str, float]:
    """The least seconds of each tier."""
    best: dict[str, float] = {}
    for config in configs:
        nbytes, seconds = figures[config]
        if nbytes <= cap_bytes:
            name = tier(config)
            best[name] = min(best.get(name, seconds), seconds)
    return best


if __name__ == "__main__":
    main()
