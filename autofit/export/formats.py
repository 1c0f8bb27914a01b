"""Comments and files: how the lines of a head and the keys of a tool become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autofit.core.strict_yaml import dump


def comment(lines: Sequence[str]) -> str:
    """The lines as a comment of YAML or Python."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def yaml_file(head: Sequence[str], keys: Mapping[str, Any]) -> str:
    """A YAML file below its head. Floats are written as 2.0e-05: a YAML 1.1 parser takes 2e-05 for text."""
    return f"{comment(head)}\n{dump(dict(keys))}"
