"""What `autofit spaces` shows: the shipped search spaces, and how many configs each holds.

The number depends on model, batch, card and installed packages: it is of a model of 8 billion
weights on a 24 GiB card."""

import dataclasses
from typing import Any

from autofit import techniques
from autofit.core.hardware import Hardware
from autofit.core.workload import Traits, Workload
from autofit.hardware.catalogue import card, hardware_of
from autofit.models import resolve
from autofit.search.enumeration import Enumeration
from autofit.search.space import list_spaces, load_space
from autofit.tuning.space import knob_choices

MODEL, CARD, EFFECTIVE_BATCH, SEQUENCE_LENGTH = "llama-3.1-8b", "rtx-4090", 32, 2048
# What inspecting the model finds (a test compares): a listing should not build 8,030,261,248 parameters.
TRAITS = Traits(
    parameters=8_030_261_248,
    blocks=32,
    linears=225,
    attention=True,
    sdpa=True,
    batch_norm=False,
    dropout=False,
    head=True,
    heads=8,
    plan=True,
)


def describe_spaces() -> dict[str, Any]:
    """Name, description, path and number of configs of every space, and the case they are counted
    for."""
    workload, hardware = reference_case()
    constraints, choices = techniques.constraints(workload, hardware), knob_choices(workload, hardware)
    rows = []
    for space in list_spaces():
        count = Enumeration(load_space(space.name, choices).knobs, constraints).count()
        counted = {"configs": count.configs, "counted": "exactly" if count.exact else "at most"}
        rows.append({"name": space.name, "description": space.description, "path": str(space.path), **counted})
    case = f"{MODEL} at {SEQUENCE_LENGTH} tokens and effective batch {EFFECTIVE_BATCH} on one {hardware.name}"
    return {"schema": 1, "counted_for": f"for {case}", "spaces": rows}


def reference_case() -> tuple[Workload, Hardware]:
    """The workload and the card that spaces are counted for; neither is built or opened."""
    workload = resolve(MODEL, sequence_length=SEQUENCE_LENGTH, effective_batch_size=EFFECTIVE_BATCH)
    return dataclasses.replace(workload, traits=TRAITS), hardware_of(card(CARD))
