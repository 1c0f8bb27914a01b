"""Which parts of a model are trained, by the names of its modules: all else stays as it is.

A part is the name of a module or of a parameter, as `named_parameters` has it:
`model.language_model`, `lm_head`, `model.layers.31.mlp`. It stands for all parameters inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from autofit.core.errors import InputError, shown

if TYPE_CHECKING:
    from torch import nn


def check_parts(parts: object) -> tuple[str, ...]:
    """Parts as a tuple.

    Raises:
        InputError: they are no list of names.
    """
    if isinstance(parts, list | tuple) and all(isinstance(part, str) and part for part in parts):
        return tuple(parts)

    message = f"what is trained must be a list of names of modules, not {shown(parts)}."
    raise InputError(message, "For example model.language_model.")


def is_inside(name: str, parts: Collection[str]) -> bool:
    """Whether a parameter is in one of the parts."""
    inside = tuple(f"{part}." for part in parts)
    return f"{name}.".startswith(inside)


def train_parts(model: nn.Module, parts: Sequence[str]) -> None:
    """Freeze every parameter that is in none of the parts.

    Raises:
        InputError: the model has no such part.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(is_inside(name, (part,)) for name in names):
            message = f"the model has no part named {shown(part)} to train."
            raise InputError(message, f"Its parts are {', '.join(_first_parts(names))}.")

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_inside(name, parts))


def parts_of(trained: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    """The fewest parts that hold all trained parameters and no other.

    Args:
        names: of all parameters.
    """
    # Every module that holds something frozen, which no part can be.
    mixed = {""}
    for name in names:
        if name not in trained:
            mixed.update(_paths(name))

    parts: dict[str, None] = {}
    for name in names:
        if name in trained:
            largest = next(path for path in _paths(name) if path not in mixed)
            parts[largest] = None

    return tuple(parts)


def _paths(name: str) -> list[str]:
    """The modules that hold a parameter, the outermost first, and the parameter itself."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _first_parts(names: Sequence[str]) -> list[str]:
    """The outermost two names of each parameter's path."""
    firsts = [_paths(name)[:2][-1] for name in names]
    return list(dict.fromkeys(firsts))
