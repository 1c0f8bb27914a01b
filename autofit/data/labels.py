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
    """Number the labels; `locations` say where each is, for messages."""
    located = list(zip(values, locations, strict=True))
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    if rule.classes == 1:
        for (value, location), number in zip(located, is_number, strict=True):
            if not number or not abs(value) <= torch.finfo(torch.float32).max:
                message = f"{location}: the model has one class, so a label must be a number, not {shown(value)}."
                raise InputError(
                    message, "Set num_labels in the model's config.json to the number of classes."
                )
        return Labels(torch.tensor([float(value) for value in values]), {})
    for value, location in located:
        if not isinstance(value, str | int):  # a float too: 1.5 is no class
            message = (
                f"{location}: a label must be a name or a whole number, not {type(value).__name__}."
            )
            raise InputError(message, "Correct the label.")
    if any(is_number) and not all(is_number):
        value, location = located[is_number.index(not is_number[0])]
        message = f"{location}: label {shown(value)} beside {shown(values[0])}, which mixes names and numbers."
        raise InputError(message, "Give either names or numbers.")
    if not all(is_number):
        named = [(str(value), location) for value, location in located]
        names = _numbered_names(named, rule)
        return Labels(torch.tensor([names[name] for name, _ in named]), names)
    for value, location in located:
        if not 0 <= value < (2**63 if rule.classes is None else rule.classes):
            count = (
                "classes count from 0"
                if rule.classes is None
                else f"the model has classes 0 to {rule.classes - 1}"
            )
            remedy = "Correct the label, or search with more classes."
            raise InputError(f"{location}: label {shown(value)}, but {count}.", remedy)
    return Labels(torch.tensor(values), {})


def _numbered_names(named: Sequence[tuple[str, str]], rule: LabelRule) -> Mapping[str, int]:
    unknown = [(name, location) for name, location in named if name not in rule.names]
    if rule.strict and unknown:
        name, location = unknown[0]
        classes = printable(", ".join(rule.names)) or "given by number"
        raise InputError(
            f"{location}: label {shown(name)} is not among the classes, which are {classes}."
        )
    if not unknown:
        return rule.names
    distinct = sorted({name for name, _ in named})
    if rule.classes is not None and len(distinct) > rule.classes:
        message = f"the data has {len(distinct)} classes, but the model has {rule.classes}."
        raise InputError(message, "Set num_labels in the model's config.json, and search again.")
    return {name: number for number, name in enumerate(distinct)}
