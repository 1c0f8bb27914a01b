"""Predicted against published peak memory of training on GPUs: `python -m benchmarks.published_memory`.

Every row of data/published_memory.csv is either predicted by tracing a workload that is built as the publisher's code
builds it, or listed with the reason why no lever of autofit expresses it. Nothing here is fitted to the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from autofit.core.config import Config
from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Workload
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.peak import peak_of
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card
from benchmarks.published_decoders import FusedDecoder, fused_loss
from benchmarks.published_layers import Adapters, Shape
from benchmarks.published_runs import DATA, QUANTISATIONS, card_of, rows
from benchmarks.published_split import SplitDecoder, split_loss

UNITS = {"GB": 10**9, "GiB": GIB}
OPTIMIZERS = (
    "torch AdamW",
    "torch AdamW fused",
    "bnb PagedAdamW",
    "bnb PagedAdamW (32-bit states)",
)
GROUPED = ("method", "quant", "checkpointing", "act_offload", "opt_in_bwd", "compile")
_NAMES = {"llama-2-7b": "Llama-2-7B"}
_FUSED_NAMES = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Outcome:
    """One row: what was published and what is predicted, in bytes, or why nothing is."""

    row: dict[str, str]
    published: float
    predicted: float | None
    note: str

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1


class StateOnHost(torch.optim.Optimizer):
    """bitsandbytes' paged AdamW, as far as the device's allocator sees it.

    The state of a tensor of 100,000 elements and more is memory that CUDA manages (functional.get_paged, optimizer.py:
    get_state_buffer), which no statistic of PyTorch counts; smaller ones have two fp32 moments on the device.
    """

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() < 100_000 and not self.state[parameter]:
                    moments = {
                        name: torch.zeros_like(parameter, dtype=torch.float32)
                        for name in ("state1", "state2")
                    }
                    self.state[parameter].update(moments)


def shape_of(model: str) -> Shape:
    """The architecture of a published model."""
    shapes = yaml.safe_load((DATA / "published_models.yaml").read_text())
    return Shape(**shapes[_NAMES.get(model, model)])


def hardware_of(row: dict[str, str]) -> Hardware:
    """The catalogue's card that a row was measured on."""
    found = card(str(card_of(row)))
    return Hardware(
        "cuda", found.title, found.memory_bytes, 64 * GIB, 64 * GIB, 8, found.capability
    )


def on_meta(make: Any) -> nn.Module:
    """A model without weights."""
    with torch.device("meta"):
        return make()  # type: ignore[no-any-return]


def _batch(count: int, *, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens.clone()}


def fused_run(row: dict[str, str]) -> tuple[Workload, Config]:
    """A run of litgpt: adapters and quantised layers are parts of its own model, so no lever of autofit makes them."""
    shape, length = shape_of(row["model"]), int(row["seq_len"])
    names = (
        row["lora_targets"].partition(" ")[0].replace("+", ",").split(",") if row["lora_r"] else []
    )
    adapters = Adapters(
        int(row["lora_r"] or 0), 0.05, frozenset(_FUSED_NAMES.get(name, name) for name in names)
    )
    quantisation = QUANTISATIONS[row["quant"]]
    # The tables' runs begin with the longest sample; those of the config hub may meet two of the longest in a row.
    follows = row["id"].startswith("litgpt-hub")
    micro, accumulated = int(row["micro_batch"]), int(row["grad_accum"])
    workload = Workload(
        model=partial(
            on_meta, partial(FusedDecoder, shape, adapters, quantisation, length, follows=follows)
        ),
        batch=partial(_batch, length=length, vocabulary=shape.vocabulary),
        loss=fused_loss,
        effective_batch_size=micro * accumulated,
        unit="tokens",
        sequence_length=length,
        optimizer=StateOnHost if "Paged" in row["optimizer"] else None,
    )
    optimizer = None if workload.optimizer else "adamw-foreach"
    return workload, Config(precision="bf16", micro_batch_size=micro, optimizer=optimizer)


def split_run(row: dict[str, str]) -> tuple[Workload, Config]:
    """A run of torchtune: checkpointing and the optimizer are levers of autofit, the rest its own model."""
    shape, length, micro = shape_of(row["model"]), int(row["seq_len"]), int(row["micro_batch"])
    names = (
        [name.partition("(")[0] for name in row["lora_targets"].split(",")] if row["lora_r"] else []
    )
    adapters = Adapters(int(row["lora_r"] or 0), on=frozenset(names))
    flags = {
        "compiled": row["compile"] == "yes",
        "chunked": row["fused_loss"].startswith("CEWithChunked"),
    }
    flags["offloaded"] = row["act_offload"] == "yes"
    quantised = row["quant"] != "none"
    workload = Workload(
        model=partial(on_meta, partial(SplitDecoder, shape, adapters, quantised, **flags)),
        batch=partial(_packed, length=length, vocabulary=shape.vocabulary),
        loss=split_loss,
        effective_batch_size=micro * int(row["grad_accum"]),
        unit="tokens",
        sequence_length=length,
    )
    return workload, Config(
        precision="bf16",
        micro_batch_size=micro,
        activation_checkpointing="full" if row["checkpointing"] == "yes" else "none",
        optimizer="adamw",
        optimizer_in_backward=row["opt_in_bwd"] == "yes",
    )


def _packed(count: int, *, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    batch = _batch(count, length=length, vocabulary=vocabulary)
    return {**batch, "positions": torch.arange(length).expand(count, length).contiguous()}


def inexpressible(row: dict[str, str]) -> str | None:
    """Why a row cannot be predicted, or None."""
    known = yaml.safe_load((DATA / "published_models.yaml").read_text())
    if _NAMES.get(row["model"], row["model"]) not in known:
        return f"the architecture of {row['model']} is not written down here"
    if row["n_gpus"] != "1":
        return "several GPUs: autofit traces one"
    if card_of(row) is None:
        return f"{row['gpu']} is not in the catalogue"
    if row["quant"] not in QUANTISATIONS:
        return f"{row['quant']}: no such quantised layer is written here"
    if row["optimizer"] not in OPTIMIZERS or row["opt_offload"] == "yes":
        return f"{row['optimizer']} (offloaded: {row['opt_offload'] or 'no'}) keeps state that is not modelled here"
    if row["mem_kind"].startswith(("reserved", "process")):
        return f"{row['mem_kind']} memory depends on the allocator's history"
    return None


def outcome_of(row: dict[str, str]) -> Outcome:
    """Predict one row, or say why not."""
    published = float(row["mem_value"]) * UNITS[row["mem_unit"]]
    reason = inexpressible(row)
    if reason:
        return Outcome(row, published, None, reason)
    workload, config = fused_run(row) if row["id"].startswith("litgpt") else split_run(row)
    hardware = hardware_of(row)
    peak = peak_of(trace(workload, config, hardware), hardware)
    predicted = peak.nbytes + workspace_bytes(hardware)
    return Outcome(row, published, predicted, f"peak in the {peak.phase}; {_told(row)}")


def _told(row: dict[str, str]) -> str:
    """What stands for the publisher's code in the prediction."""
    if row["id"].startswith("litgpt"):
        parts = ["litgpt's fused decoder"]
        parts += ["adapters inside"] if row["lora_r"] else []
        parts += ["4-bit layers that keep their input"] if row["quant"] != "none" else []
        parts += ["after another such micro-batch"] if row["id"].startswith("litgpt-hub") else []
        return ", ".join(parts)
    parts = ["torchtune's decoder"]
    parts += ["layers and loss partitioned as compiled"] if row["compile"] == "yes" else []
    parts += ["its own offloading"] if row["act_offload"] == "yes" else []
    return ", ".join(parts)


def table(outcomes: list[Outcome]) -> str:
    """Every row, predicted or not, in the unit that it was published in."""
    lines = ["| row | model | trained | batch x length | predicted | published | error | note |"]
    lines.append("|---|---|---|---|---:|---:|---:|---|")
    for each in outcomes:
        row, unit = each.row, UNITS[each.row["mem_unit"]]
        trained = " ".join(
            filter(None, (row["method"], row["lora_r"], row["quant"].replace("none", "")))
        )
        predicted = "-" if each.predicted is None else f"{each.predicted / unit:.2f}"
        error = "-" if each.error is None else f"{each.error:+.2%}"
        cells = (
            row["id"],
            row["model"],
            trained,
            f"{row['micro_batch']} x {row['seq_len']}",
            predicted,
        )
        lines.append(
            "| "
            + " | ".join((*cells, f"{row['mem_value']} {row['mem_unit']}", error, each.note))
            + " |"
        )
    return "\n".join(lines)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Median and worst error, the share within 10 %, and how often each method and knob is predicted too high."""
    errors = [each.error for each in outcomes if each.error is not None]
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(outcomes),
        "predicted": len(errors),
        "inexpressible": {each.row["id"]: each.note for each in outcomes if each.error is None},
        "median_error": statistics.median(sizes),
        "worst_error": max(sizes),
        "within_10_percent": sum(size <= 0.1 for size in sizes) / len(sizes),
        "signs": signs(outcomes),
    }


def signs(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """For each method and knob of at least 8 rows: how many are too high, and the chance of that under a fair coin."""
    groups: dict[str, list[float]] = {}
    for each in outcomes:
        for name in GROUPED if each.error is not None else ():
            value = (
                "yes" if name == "quant" and each.row[name] != "none" else each.row[name] or "no"
            )
            groups.setdefault(f"{name} {value}", []).append(each.error or 0.0)
    return {name: _sign(errors) for name, errors in sorted(groups.items()) if len(errors) >= 8}


def _sign(errors: list[float]) -> dict[str, float]:
    high, count = sum(error > 0 for error in errors), len(errors)
    tail = sum(math.comb(count, k) for k in range(min(high, count - high) + 1)) / 2**count
    return {
        "rows": count,
        "too_high": high,
        "chance": min(1.0, 2 * tail),
        "median": statistics.median(errors),
    }


def main(arguments: list[str] | None = None) -> int:
    """Predict every row and print the table and what it comes to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_memory", description=__doc__
    )
    parser.add_argument("--only", default="", help="rows whose id begins so")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    given = parser.parse_args(arguments)
    outcomes = [
        outcome_of(row) for row in rows("published_memory") if row["id"].startswith(given.only)
    ]
    figures = summary(outcomes)
    print(table(outcomes))
    print(f"\n{figures['predicted']} of {figures['rows']} rows predicted: ", end="")
    print(
        f"median error {figures['median_error']:.2%}, worst {figures['worst_error']:.2%}, ", end=""
    )
    print(f"{figures['within_10_percent']:.0%} within 10 %.")
    for name, sign in figures["signs"].items():
        print(
            f"{name}: {sign['too_high']} of {sign['rows']} too high (chance {sign['chance']:.2g}), ",
            end="",
        )
        print(f"median {sign['median']:+.2%}")
    if given.out:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
