"""The knobs that `--set` takes, for help and completion.

Techniques load torch when they are imported, which help must not wait for. So their source files are read instead:
what a knob takes stands there as a plain tuple of `values`, or in words in `takes`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autofit.core.config import Value
from autofit.report.formatting import value

_TECHNIQUES = Path(__file__).resolve().parents[1] / "techniques"
_DERIVED = ("gradient_accumulation_steps",)  # what the micro-batch leaves: a search refuses to be told


@dataclass(frozen=True)
class Knob:
    """A knob of `--set`: all its values, or in words what it takes."""

    name: str
    values: tuple[Value, ...] = ()
    takes: str = ""

    @property
    def told(self) -> str:
        """What it takes, in one line."""
        return self.takes or ", ".join(map(value, self.values))


def known_knobs() -> list[Knob]:
    """The knobs that ship with autofit and are not derived from others, by name."""
    return [knob for path in sorted(_TECHNIQUES.glob("*.py")) for knob in _knobs(path) if knob.name not in _DERIVED]


def _knobs(path: Path) -> Iterator[Knob]:
    for each in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(each, ast.ClassDef):
            stated = {
                target.id: line.value
                for line in each.body
                if isinstance(line, ast.Assign)
                for target in line.targets
                if isinstance(target, ast.Name) and target.id in ("name", "values", "takes")
            }
            if "name" in stated:
                yield Knob(**{name: ast.literal_eval(written) for name, written in stated.items()})
