"""Which layers of a model a file of another tool puts adapters beside, as `lora_targets` names
them."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autofit.core.errors import InputError, RefusedError, printable
from autofit.setup.experts import expert_weights
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.meta_model import meta_model_from

Factory = Callable[[], Any]

# Modules that hold what reads texts in a model that takes images, or sounds, too.
_READERS = ("language_model",)


def named_layers(factory: Factory, names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """`lora_targets` of a list of names, and those of them that no layer has.

    peft passes over a name without a layer, where another has one.
    """
    model = meta_model_from(factory)
    found = []
    missing = []
    for name in names:
        try:
            adapter_targets(model, name)
        except RefusedError:
            missing.append(name)
        else:
            found.append(name)

    if not found:
        return "+".join(names), ()  # which is refused with the names that there are

    return "+".join(found), tuple(missing)


def usual_layers(factory: Factory) -> list[str]:
    """The names of the layers that peft puts adapters beside where nobody names any.

    Raises:
        InputError: peft knows none for this kind of model.
    """
    from peft import utils

    known = utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    kind = str(getattr(meta_model_from(factory).config, "model_type", None))
    if kind not in known:
        message = f"the file names no layers for adapters, and peft knows none for {kind}."
        raise InputError(message, "Name them in the file, as it takes them.")

    return list(known[kind])


def matched_layers(factory: Factory, pattern: str) -> str:
    """`lora_targets` of a regular expression, which peft matches with whole names.

    Raises:
        InputError: it is none, or matches no layer.
    """
    try:
        matcher = re.compile(pattern)
    except re.error as error:
        message = (
            f"the layers with adapters are {printable(pattern)}, which is no pattern: {error}."
        )
        raise InputError(message, "Correct it.") from error

    linears, experts = _layers(factory)
    wanted = {name for name in linears if matcher.fullmatch(name)}
    if not wanted:
        message = f"no linear layer of the model matches {printable(pattern)}."
        raise InputError(message, "Correct the pattern, or give the file's own --model DIRECTORY.")

    return _names_of(wanted, {*linears, *experts})


def reading_layers(factory: Factory) -> str | None:
    """`lora_targets` of what reads texts in a model that takes images, too; None of any other."""
    linears, experts = _layers(factory)
    for reader in _READERS:
        wanted = _selected(reader, linears)
        if wanted and len(wanted) < len(linears):
            return _names_of(wanted, {*linears, *experts})

    return None


def _layers(factory: Factory) -> tuple[list[str], list[str]]:
    """The names of all linear layers but the head, and of the weights of experts."""
    model = meta_model_from(factory)
    linears, _ = adapter_targets(model, "all-linear")

    return linears, [weight.full_name for weight in expert_weights(model)]


def _selected(part: str, names: Collection[str]) -> set[str]:
    """The names that hold a part, as `lora_targets` takes it."""
    return {name for name in names if f".{part}." in f".{name}."}


def _names_of(wanted: Collection[str], names: Collection[str]) -> str:
    """A few parts of names that select the wanted ones and no other."""
    parts = dict.fromkeys(wanted)  # of which any set can be made
    for name in wanted:
        for run in re.split(r"\.\d+\.|\.\d+$", name):
            words = run.split(".")
            for start in range(len(words)):
                for stop in range(start + 1, len(words) + 1):
                    parts[".".join(words[start:stop])] = None

    selected = {}
    for part in parts:
        found = _selected(part, names)
        if found <= set(wanted):
            selected[part] = found

    chosen = []
    left = set(wanted)
    while left:
        # the one that selects most, of those the shortest
        best = max(selected, key=lambda part: (len(selected[part] & left), -len(part), part))
        chosen.append(best)
        left -= selected[best]

    return "+".join(sorted(chosen))
