"""Presets: named architectures of transformers' models, as data in presets.yaml and shapes/."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autofit.core.errors import unknown
from autofit.core.strict_yaml import load_own
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.models.huggingface import HuggingFaceModel


@dataclass(frozen=True)
class Preset:
    """A named architecture.

    Attributes:
        parameters: its size, as published.
        hub: where its weights are.
        config: its config.json as a mapping.
        kind: which models it may stand for, as a file of shapes/ is called.
        also: further models of the same sizes, in lower case and without their owner.
    """

    name: str
    task: str
    parameters: int
    hub: str | None
    config: Mapping[str, Any]
    kind: str = ""
    also: Sequence[str] = ()


@cache
def presets() -> dict[str, Preset]:
    """All of them by name, in the order of their files."""
    here = Path(__file__).parent
    found: dict[str, Preset] = {}
    for name, entry in load_own(here / "presets.yaml").items():
        kind = "encoders"
        if entry["task"] == CAUSAL_LM.name:
            kind = "decoders"
        found[name] = Preset(name, kind=kind, **entry)

    for path in sorted((here / "shapes").glob("*.yaml")):
        for family in load_own(path).values():
            task = family.get("task", CAUSAL_LM.name)
            for name, entry in family["models"].items():
                found[name] = Preset(
                    name,
                    task=task,
                    parameters=int(entry["parameters"]),
                    hub=entry["hub"],
                    config=_merged(family["config"], entry["config"]),
                    kind=path.stem,
                    also=entry.get("also", ()),
                )

    return found


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both, those of mappings within them, too; `own` wins."""
    merged = dict(common)
    for key, value in own.items():
        known = merged.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            value = _merged(known, value)
        merged[key] = value

    return merged


def preset_names() -> tuple[str, ...]:
    """The names of all presets of transformers' models, in the order of their files."""
    return tuple(presets())


def load_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: there is none; the message names the nearest one.
    """
    if name not in presets():
        raise unknown("model", name, preset_names())
    return presets()[name]


def preset_model(name: str) -> HuggingFaceModel:
    """The model of that name; raises as `load_preset`."""
    preset = load_preset(name)
    return HuggingFaceModel(
        name,
        preset.task,
        preset.config,
        {"kind": "preset", "model": name},
    )
