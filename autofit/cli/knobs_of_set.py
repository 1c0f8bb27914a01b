"""The knobs that `--set` takes, for help and completion.

Techniques import torch, which help must not wait for. So their source files are read instead: a knob's values stand
there as a plain tuple `values`, or in words as `takes`.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from autofit.core.config import Value
from autofit.report.formatting import value

_TECHNIQUES = Path(__file__).resolve().parents[1] / "techniques"
_SAID = ("name", "values", "takes")
_DERIVED = ("gradient_accumulation_steps",)  # follows from the micro-batch: a search refuses to set it


@dataclass(frozen=True)
class Knob:
    """A knob of `--set`: all its values, or in words what it takes."""

    name: str
    values: tuple[Value, ...] = ()
    takes: str = ""

    @property
    def description(self) -> str:
        """What it takes, in one line."""
        return self.takes or ", ".join(map(value, self.values))


def known_knobs() -> list[Knob]:
    """The knobs that ship with autofit and are not derived from others, by name."""
    knobs = []
    for path in sorted(_TECHNIQUES.glob("*.py")):
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        for technique in (node for node in nodes if isinstance(node, ast.ClassDef)):
            lines = (line for line in technique.body if isinstance(line, ast.Assign))
            assigned = {ast.unparse(line.targets[0]): line.value for line in lines}
            said = {name: ast.literal_eval(assigned[name]) for name in _SAID if name in assigned}
            if "name" in said and said["name"] not in _DERIVED:
                knobs.append(Knob(**said))
    return knobs
