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

MODEL = "llama-3.1-8b"
CARD = "rtx-4090"
EFFECTIVE_BATCH = 32
SEQUENCE_LENGTH = 2048
# What inspecting the model finds (a test compares), so that a listing need not build it.
TRAITS = Traits(
    parameters=8_030_261_248,
    blocks=32,
    linears=225,
    attention=True,
    sdpa=True,
    batch_norm=False,
    dropout=False,
    adapter_parameters=2_621_440,
    head=True,
    heads=8,
    plan=True,
)


def describe_spaces() -> dict[str, Any]:
    """Name, description, path and size of every space, and the case that sizes are counted for."""
    workload, hardware = reference_case()
    constraints = techniques.constraints(workload, hardware)
    choices = knob_choices(workload, hardware)

    rows = []
    for space in list_spaces():
        knobs = load_space(space.name, choices).knobs
        count = Enumeration(knobs, constraints).count()
        row = {
            "name": space.name,
            "description": space.description,
            "path": str(space.path),
            "configs": count.configs,
            "counted": "exactly" if count.exact else "at most",
        }
        rows.append(row)

    sizes = f"{SEQUENCE_LENGTH} tokens and effective batch {EFFECTIVE_BATCH}"
    case = f"for {MODEL} at {sizes} on one {hardware.name}"
    return {"schema": 1, "counted_for": case, "spaces": rows}


def reference_case() -> tuple[Workload, Hardware]:
    """The workload and the card that spaces are counted for; neither is built or opened."""
    workload = resolve(
        MODEL,
        sequence_length=SEQUENCE_LENGTH,
        effective_batch_size=EFFECTIVE_BATCH,
    )
    return dataclasses.replace(workload, traits=TRAITS), hardware_of(card(CARD))
