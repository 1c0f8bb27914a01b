"""Class labels become class numbers: numbers stay, names are numbered in alphabetical order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofit.core.errors import InputError, printable, shown
from autofit.data.options import LabelRule


@dataclass(frozen=True)
class Labels:
    """One number per sample, and the classes that have names."""

    numbers: torch.Tensor
    names: Mapping[str, int]


def labels_from(values: Sequence[Any], locations: Sequence[str], rule: LabelRule) -> Labels:
    """Number the labels.

    Args:
        locations: where each label is, for messages.

    Raises:
        InputError: a label is none, names and numbers are mixed, or the model has other classes.
    """
    located = list(zip(values, locations, strict=True))
    if rule.classes == 1:
        for value, location in located:
            _check_measured(value, location)
        return Labels(torch.tensor(list(map(float, values))), {})

    for value, location in located:
        if not isinstance(value, str | int):  # a float too: 1.5 is no class
            given = type(value).__name__
            message = f"{location}: a label must be a name or a whole number, not {given}."
            raise InputError(message, "Correct the label.")

    are_numbers = not values or _is_number(values[0])
    for value, location in located:
        if _is_number(value) != are_numbers:
            both = f"{shown(value)} beside {shown(values[0])}"
            message = f"{location}: label {both}, which mixes names and numbers."
            raise InputError(message, "Give either names or numbers.")

    if not are_numbers:
        named = list(map(str, values))
        names = _numbered_names(named, locations, rule)
        return Labels(torch.tensor([names[name] for name in named]), names)

    most = 2**63
    classes = "classes count from 0"
    if rule.classes is not None:
        most = rule.classes
        classes = f"the model has classes 0 to {most - 1}"
    for value, location in located:
        if not 0 <= value < most:
            message = f"{location}: label {shown(value)}, but {classes}."
            raise InputError(message, "Correct the label, or search with more classes.")

    return Labels(torch.tensor(values), {})


def _is_number(value: Any) -> bool:
    """Whether a value is a whole number or a fraction; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_measured(value: Any, location: str) -> None:
    """Raise InputError unless a label is a number that a regression can learn."""
    if not _is_number(value) or not abs(value) <= torch.finfo(torch.float32).max:
        message = (
            f"{location}: the model has one class, so a label must be a number, not {shown(value)}."
        )
        remedy = "Set num_labels in the model's config.json to the number of classes."
        raise InputError(message, remedy)


def _numbered_names(
    named: Sequence[str],
    locations: Sequence[str],
    rule: LabelRule,
) -> Mapping[str, int]:
    """The number of each name: the model's where it knows them all, else by the alphabet."""
    distinct = set(named)
    unknown = distinct - rule.names.keys()
    if not unknown:
        return rule.names

    if rule.strict:
        first = min(map(named.index, unknown))
        what = f"{locations[first]}: label {shown(named[first])}"
        classes = printable(", ".join(rule.names)) or "given by number"
        raise InputError(f"{what} is not among the classes, which are {classes}.")

    if rule.classes is not None and len(distinct) > rule.classes:
        message = f"the data has {len(distinct)} classes, but the model has {rule.classes}."
        raise InputError(message, "Set num_labels in the model's config.json, and search again.")

    return {name: number for number, name in enumerate(sorted(distinct))}
