"""Whether what is named as a help fits: configs drawn at random that do not fit a card, each remedy followed in full.

`python -m benchmarks.what_helps [--cases 100] [--seed 0] [--smoke] [--out FILE]`; half an hour on 2 cores. With
--out each case is written as soon as it is known, and cases that the file holds already are not done again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import AutofitError
from autofit.core.estimate import Remedy
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.trace import trace
from autofit.hardware.budgets import budget_for
from autofit.hardware.catalogue import card, card_names, hardware_of
from autofit.models import resolve
from autofit.tuning.remedies import what_helps
from autofit.tuning.target import estimate_on, structure_traits

MODELS = ("gpt2", "gpt2", "bert-base", "vit-base", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-1b")
LARGE = ("tinyllama-1.1b", "qwen3-0.6b", "llama-3.2-3b", "llama-3.1-8b")
_LENGTHS = {
    "gpt2": (512, 1024),
    "bert-base": (256, 512),
    "vit-base": (None,),
    "tiny-llama": (2048,),
}
WANTED = 0.95  # of the cases: all that is named fits
_LARGE_SHARE = 0.1
_KNOBS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "bf16-mixed"),
    "micro_batch_size": (1, 2, 4, 8, 16),
    "activation_checkpointing": ("none", "none", "selective", "full"),
    "optimizer": ("adamw", "adamw", "adamw-8bit", "adafactor"),
    "loss": ("standard", "chunked"),
    "lora_rank": (0, 0, 0, 16),
}
_TIGHT, _AMPLE = 0.2, 0.95  # of what a config needs: the budgets that it is held against


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw, follow, print, and write the cases where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a case of a small model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    models = ("tiny-llama",) if options.smoke else None
    rows: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    for number in range(len(rows), 1 if options.smoke else options.cases):
        rows.append(case(random.Random(f"{options.seed}/{number}"), models))
        if options.out:
            options.out.write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
    print(report(rows))


def case(draw: random.Random, models: Sequence[str] | None = None) -> dict[str, Any]:
    """A config that does not fit, what is named as a help, and the verdict on each when its step is followed."""
    while True:
        asked = _drawn(draw, models or (LARGE if draw.random() < _LARGE_SHARE else MODELS))
        if asked is not None:
            break
    workload, hardware, budget, config = asked
    start = time.process_time()
    remedies = what_helps(workload, hardware, budget, config)
    seconds = time.process_time() - start
    return {
        "model": workload.name,
        **{name: workload.summary()[name] for name in ("sequence_length", "effective_batch_size")},
        "card": hardware.name,
        "budget_gib": round(budget.device_bytes / GIB, 3),
        "config": {knob: config[knob] for knob in _KNOBS},
        "seconds": round(seconds, 1),
        "remedies": [followed(workload, hardware, budget, each) for each in remedies],
    }


def _drawn(
    draw: random.Random, models: Sequence[str]
) -> tuple[Workload, Hardware, Budget, Config] | None:
    """A workload and a config that is possible, on a card that is too small for it; None where there is none."""
    name, batch = draw.choice(models), draw.choice((8, 16, 32))
    length = draw.choice(_LENGTHS.get(name, (512, 1024, 2048)))
    workload = resolve(name, sequence_length=length, effective_batch_size=batch)
    hardware = hardware_of(card(draw.choice(card_names())))
    workload = replace(workload, traits=structure_traits(workload, hardware))
    knobs = {knob: draw.choice(values) for knob, values in _KNOBS.items()}
    knobs["micro_batch_size"] = min(knobs["micro_batch_size"], batch)
    try:
        config = techniques.canonicalize(knobs, workload, hardware)
    except AutofitError:
        return None
    if techniques.refuse(config, workload, hardware):
        return None
    needed = predict_all(workload, hardware, [config])[0][0] + hardware.context_bytes
    asked = max(hardware.context_bytes + 128 * MIB, draw.uniform(_TIGHT, _AMPLE) * needed)
    budget = budget_for(SearchOptions(gpu_mem=min(asked, hardware.memory_bytes) / GIB), hardware)
    return None if needed <= budget.cap_bytes("cuda") else (workload, hardware, budget, config)


def followed(
    workload: Workload, hardware: Hardware, budget: Budget, remedy: Remedy
) -> dict[str, Any]:
    """What was named, and what its own estimate, of a whole step, says of it."""
    words = dict(zip(remedy.options[::2], remedy.options[1::2], strict=True))
    if length := words.get("--seq-len"):
        batch = workload.effective_batch_size
        shorter = resolve(workload.name, sequence_length=int(length), effective_batch_size=batch)
        workload = replace(shorter, traits=workload.traits)
    if size := words.get("--gpu-mem"):
        budget = replace(budget, device_bytes=int(float(size) * GIB))
    there = hardware.of_several(remedy.devices, hardware.nodes, hardware.link)
    found = estimate_on(trace(workload, remedy.config, there), workload, there, budget)
    usable = budget.cap_bytes("cuda")
    return {
        "kind": remedy.kind,
        "options": " ".join(remedy.options),
        "verdict": found.verdict,
        "named": round(remedy.device_bytes / usable, 3),
        "low": round(found.low / usable, 3),
        "high": round(found.high / usable, 3),
    }


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """In how many cases all that is named fits, and by kind how many remedies do."""
    every = [each for row in rows for each in row["remedies"]]
    right = [all(each["verdict"] == "yes" for each in row["remedies"]) for row in rows]
    share = f"{sum(right)} of {len(rows)} cases: all that is named fits (wanted: {WANTED:.0%})"
    return "\n".join(
        [
            share,
            *_by_kind(every),
            f"{sum(not row['remedies'] for row in rows)} cases without a remedy",
        ]
    )


def _by_kind(remedies: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kind in dict.fromkeys(each["kind"] for each in remedies):
        verdicts = Counter(each["verdict"] for each in remedies if each["kind"] == kind)
        yield f"  {kind:8} {', '.join(f'{verdicts[word]} {word}' for word in ('yes', 'maybe', 'no') if verdicts[word])}"


if __name__ == "__main__":
    main()
