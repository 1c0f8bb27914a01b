"""The search spaces that ship with autofit, and how many configs each holds in one case that everybody knows.

The number depends on model, batch and card, so it is told of a model of 8 billion weights on one card of 24 GiB, as far
as the packages installed here allow it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autofit import techniques
from autofit.core.hardware import Hardware
from autofit.core.workload import Traits, Workload
from autofit.hardware.catalogue import card, hardware_of
from autofit.models import resolve
from autofit.search import Enumeration, list_spaces, load_space
from autofit.tuning.space import knob_choices

MODEL, CARD, EFFECTIVE_BATCH, SEQUENCE_LENGTH = "llama-3.1-8b", "rtx-4090", 32, 2048
# What a look at the model's structure tells (a test compares): known here, because a listing should not build it.
TRAITS = Traits(
    parameters=8_030_261_248,
    blocks=32,
    linears=225,
    attention=True,
    sdpa=True,
    batch_norm=False,
    dropout=False,
    head=True,
)


def describe_spaces() -> dict[str, Any]:
    """Plain data: name, description, path and number of configs of every space, and the case they are counted for."""
    workload, hardware = reference_case()
    return {
        "schema": 1,
        "counted_for": f"for {MODEL} at {SEQUENCE_LENGTH} tokens and effective batch {EFFECTIVE_BATCH} "
        f"on one {hardware.name}",
        "spaces": [
            {"name": each.name, "description": each.description, "path": str(each.path)}
            | _count(each.name, workload, hardware)
            for each in list_spaces()
        ],
    }


def reference_case() -> tuple[Workload, Hardware]:
    """The workload and the card that spaces are counted for; nothing is built or opened."""
    hardware = hardware_of(card(CARD))
    workload = resolve(MODEL, sequence_length=SEQUENCE_LENGTH, effective_batch_size=EFFECTIVE_BATCH)
    return dataclasses.replace(workload, traits=TRAITS), hardware


def _count(name: str, workload: Workload, hardware: Hardware) -> dict[str, Any]:
    space = load_space(name, knob_choices(workload, hardware))
    found = Enumeration(space.knobs, techniques.constraints(workload, hardware)).count()
    return {"configs": found.configs, "counted": "exactly" if found.exact else "at most"}
