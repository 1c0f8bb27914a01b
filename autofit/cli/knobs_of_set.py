"""The knobs that `--set` takes, for help, completion and a first look at what is given.

Techniques import torch, which none of them must wait for. So their source files are read instead: a knob's values stand
there as plain `values` or `numbers`, and in words as `takes`.
"""

import ast
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from autofit.core.config import Value
from autofit.core.errors import unknown
from autofit.core.knobs import Knob

_TECHNIQUES = Path(__file__).resolve().parents[1] / "techniques"
_SAID = tuple(field.name for field in fields(Knob))
_DERIVED = ("gradient_accumulation_steps",)  # follows from the micro-batch: a search refuses to set it


def known_knobs(*, derived: bool = False) -> list[Knob]:
    """The knobs that ship with autofit, by name; those that follow from others only if asked for."""
    knobs = []
    for path in sorted(_TECHNIQUES.glob("*.py")):
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        for technique in (node for node in nodes if isinstance(node, ast.ClassDef)):
            lines = (line for line in technique.body if isinstance(line, ast.Assign))
            assigned = {ast.unparse(line.targets[0]): line.value for line in lines}
            said = {name: ast.literal_eval(assigned[name]) for name in _SAID if name in assigned}
            if "name" in said and (derived or said["name"] not in _DERIVED):
                knobs.append(Knob(**said))
    return knobs


def check_knobs(config: Mapping[str, Value]) -> None:
    """Raise an InputError for a knob of a config that does not exist, or a value it never takes."""
    knobs = {each.name: each for each in known_knobs(derived=True)}
    for name, value in config.items():
        if name not in knobs:
            raise unknown("knob", name, knobs)
        knobs[name].check(value)
