"""The knobs that `--set` takes, for help, completion and a first look at what is given.

Techniques import torch, which none of them must wait for. So their source files are read instead: a knob's values stand
there as plain `values` or `numbers`, and in words as `takes`.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from autofit.core.config import Value
from autofit.core.errors import unknown
from autofit.core.knobs import Knob

_TECHNIQUES = Path(__file__).resolve().parents[1] / "techniques"
_BASES = _TECHNIQUES.with_name("setup") / "technique.py"
_SAID = tuple(field.name for field in fields(Knob))
_DERIVED = ("gradient_accumulation_steps",)  # follows from the micro-batch: a search refuses to set it


def known_knobs(*, derived: bool = False) -> list[Knob]:
    """The knobs that ship with autofit, by name; those that follow from others only if asked for."""
    bases, knobs = {name: said for name, _, said in _classes(_BASES)}, []
    for path in sorted(_TECHNIQUES.glob("*.py")):
        for _, base, own in _classes(path):
            if "name" in own and (derived or own["name"] not in _DERIVED):
                knobs.append(Knob(**{**bases.get(base, {}), **own}))
    return knobs


def _classes(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The classes of a file with their base, and what each says of a knob."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    for technique in (node for node in nodes if isinstance(node, ast.ClassDef)):
        lines = (line for line in technique.body if isinstance(line, ast.Assign))
        assigned = {ast.unparse(line.targets[0]): line.value for line in lines}
        said = {name: ast.literal_eval(assigned[name]) for name in _SAID if name in assigned}
        yield technique.name, "".join(map(ast.unparse, technique.bases)), said


def check_knobs(config: Mapping[str, Value]) -> None:
    """Raise an InputError for a knob of a config that does not exist, or a value it never takes."""
    knobs = {each.name: each for each in known_knobs(derived=True)}
    for name, value in config.items():
        if name not in knobs:
            raise unknown("knob", name, knobs)
        knobs[name].check(value)
