"""Class labels as files have them become class numbers: numbers stay, names are numbered in alphabetical order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autofit.core.errors import InputError


@dataclass(frozen=True)
class LabelRule:
    """What the model says about its classes.

    Args:
        classes: how many it has; 1 means that labels are measured values (regression), None that it is not known.
        names: the numbers of classes that have names, used when all names of a file are among them.
        strict: names that are not among `names` are an error, as in evaluation data.
    """

    classes: int | None = None
    names: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class Labels:
    """One number per sample, and the classes that have names."""

    numbers: torch.Tensor
    names: Mapping[str, int]


def labels_from(values: Sequence[Any], places: Sequence[str], rule: LabelRule) -> Labels:
    """Number the labels; `places` say where each stands, for messages.

    Raises:
        InputError: a label that is neither name nor number, numbers beside names, or a class the model does not have.
    """
    numeric = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    if rule.classes == 1:
        return Labels(torch.tensor([_measured(*each) for each in zip(values, numeric, places, strict=True)]), {})
    for value, place in zip(values, places, strict=True):
        if not isinstance(value, str | int):  # a float too: 1.5 is no class
            given = type(value).__name__
            raise InputError(f"{place}: a label must be a name or a whole number, not {given}.", "Correct the label.")
    if any(numeric) and not all(numeric):
        odd = numeric.index(not numeric[0])
        message = f"{places[odd]}: label {values[odd]!r} beside {values[0]!r}, which mixes names and numbers."
        raise InputError(message, "Give either names or numbers.")
    if all(numeric):
        return Labels(_checked_numbers(values, places, rule.classes), {})
    named = [str(value) for value in values]
    names = _names(named, places, rule)
    return Labels(torch.tensor([names[name] for name in named]), names)


def _measured(value: Any, numeric: bool, place: str) -> float:
    if not numeric:
        message = f"{place}: the model has one class, so a label must be a number, not {value!r}."
        raise InputError(message, "Set num_labels in the model's config.json to the number of classes.")
    return float(value)


def _checked_numbers(values: Sequence[int], places: Sequence[str], classes: int | None) -> torch.Tensor:
    for value, place in zip(values, places, strict=True):
        if value < 0 or (classes is not None and value >= classes):
            known = "classes count from 0" if classes is None else f"the model has classes 0 to {classes - 1}"
            raise InputError(f"{place}: label {value}, but {known}.", "Correct the label, or search with more classes.")
    return torch.tensor(values)


def _names(named: Sequence[str], places: Sequence[str], rule: LabelRule) -> Mapping[str, int]:
    found = sorted(set(named))
    if rule.strict:
        for name, place in zip(named, places, strict=True):
            if name not in rule.names:
                known = ", ".join(rule.names) or "given by number"
                raise InputError(f"{place}: label {name!r} is not among the classes, which are {known}.")
    if all(name in rule.names for name in found):
        return rule.names
    if rule.classes is not None and len(found) > rule.classes:
        message = f"the data has {len(found)} classes, but the model has {rule.classes}."
        raise InputError(message, "Set num_labels in the model's config.json, and search again.")
    return {name: number for number, name in enumerate(found)}
