"""What is measured: shapes of models, ways to train them, and levers; and in which order.

The order mixes all three, so that whatever part of it there is time for says something about each of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TINY = Path(__file__).with_name("tiny-decoder")  # what is rehearsed with
FIRST, REHEARSAL = (
    Path(__file__).with_name("first.json"),
    Path(__file__).with_name("rehearsal.json"),
)
FULL, LORA, QLORA = "full", "lora", "qlora"
_ADAPTERS = {"lora_rank": 16, "lora_targets": "all-linear"}
_ALL = (FULL, LORA, QLORA)


@dataclass(frozen=True)
class Case:
    """One config of one model; `lever` is what it changes of the plain one of its technique."""

    model: str
    technique: str
    lever: str
    knobs: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The name of its row."""
        return f"{self.model} {json.dumps(dict(self.knobs), sort_keys=True)}"


@dataclass(frozen=True)
class Lever:
    """Knobs changed together, and the techniques beside which they are tried."""

    name: str
    knobs: Mapping[str, Any]
    techniques: Sequence[str] = _ALL


@dataclass(frozen=True)
class Grid:
    """Models by the preset or directory of their shape, techniques by the knobs they start from, levers, sizes, and a
    list of configs that tell most."""

    models: Mapping[str, str]
    techniques: Mapping[str, Mapping[str, Any]]
    levers: Sequence[Lever]
    sequence_length: int
    effective_batch_size: int
    wanted: int
    listed: Path
    alone: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def case(self, model: str, technique: str, lever: Lever) -> Case:
        """A lever beside a technique; none at all is the plain config."""
        return Case(model, technique, lever.name, {**self.techniques[technique], **lever.knobs})

    def mixed(self) -> list[Case]:
        """Every legal triple once, each next one of another model, technique and lever than the one before."""
        return list(_mixed(self))

    def one_at_a_time(self) -> list[Case]:
        """Every lever alone, from the plain config of the pairs in `alone`: first those, then lever by lever."""
        return [
            self.case(model, technique, lever)
            for lever in self.levers
            for model, technique in self.alone
            if technique in lever.techniques
        ]


def _mixed(grid: Grid) -> Iterator[Case]:
    models, techniques, levers = list(grid.models), list(grid.techniques), list(grid.levers)
    pairs = _pairs(models, techniques)
    step = next(
        each
        for each in range(len(pairs), len(pairs) + len(levers) + 1)
        if math.gcd(each, len(levers)) == 1
    )
    for turn in range(len(levers)):
        for place, (model, technique) in enumerate(pairs):
            lever = levers[(place + turn * step) % len(levers)]
            if technique in lever.techniques:
                yield grid.case(model, technique, lever)


def _pairs(models: Sequence[str], techniques: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs, both taking turns."""
    count = len(models) * len(techniques)
    turns = [
        (
            models[n % len(models)],
            techniques[(n + n // math.lcm(len(models), len(techniques))) % len(techniques)],
        )
        for n in range(count)
    ]
    assert len(set(turns)) == count, "every pair has its turn"
    return turns


LEVERS = (
    Lever("plain", {}),
    Lever("checkpointing full", {"activation_checkpointing": "full"}),
    Lever("micro-batch 1", {"micro_batch_size": 1}),
    Lever("chunked loss", {"loss": "chunked"}),
    Lever("adamw-8bit", {"optimizer": "adamw-8bit"}, (FULL, LORA)),
    Lever("activation offload", {"activation_offload": "cpu"}),
    Lever("checkpointing selective", {"activation_checkpointing": "selective"}),
    Lever("bf16-mixed", {"precision": "bf16-mixed"}),
    Lever(
        "micro-batch 8, checkpointing full",
        {"micro_batch_size": 8, "activation_checkpointing": "full"},
    ),
    Lever("compile", {"compile": "default"}),
    Lever("optimizer offload", {"optimizer_offload": "cpu"}, (FULL,)),
    Lever("nf4-dq", {"quantization": "nf4-dq"}, (QLORA,)),
    Lever("checkpointing alternate", {"activation_checkpointing": "alternate"}),
    Lever("parameter offload", {"parameter_offload": "cpu"}, (LORA,)),
    Lever("adafactor", {"optimizer": "adafactor"}, (FULL, LORA)),
    Lever("liger", {"kernels": "liger"}),
    Lever("eager attention", {"attention": "eager"}),
    Lever("flash attention", {"attention": "flash"}),
    Lever(
        "update in backward, checkpointing full",
        {"optimizer_in_backward": True, "micro_batch_size": 8, "activation_checkpointing": "full"},
        (FULL,),
    ),
    Lever("int8", {"quantization": "int8"}, (QLORA,)),
    Lever("adamw-foreach", {"optimizer": "adamw-foreach"}, (FULL,)),
    Lever("fp8", {"precision": "fp8"}, (FULL, LORA)),
    Lever("fused loss", {"loss": "fused"}),
    Lever("adamw-4bit", {"optimizer": "adamw-4bit"}, (FULL,)),
    Lever("rank 64", {"lora_rank": 64}, (LORA, QLORA)),
)
CARD = Grid(
    models={
        "0.5B": "qwen2.5-0.5b",
        "8B": "llama-3.1-8b",
        "1.5B": "qwen2.5-1.5b",
        "3B": "llama-3.2-3b",
    },
    techniques={
        FULL: {"precision": "bf16", "micro_batch_size": 2},
        LORA: {"precision": "bf16", "micro_batch_size": 2, **_ADAPTERS},
        QLORA: {"precision": "bf16", "micro_batch_size": 2, **_ADAPTERS, "quantization": "nf4"},
    },
    levers=LEVERS,
    sequence_length=2048,
    effective_batch_size=8,
    wanted=48,
    listed=FIRST,
    alone=(("1.5B", FULL), ("8B", LORA)),
)
SMOKE = Grid(
    models={"tiny": str(TINY)},
    techniques={name: {**knobs, "micro_batch_size": 2} for name, knobs in CARD.techniques.items()},
    levers=LEVERS[:3],
    sequence_length=32,
    effective_batch_size=4,
    wanted=3,
    listed=REHEARSAL,
    alone=(("tiny", FULL),),
)
