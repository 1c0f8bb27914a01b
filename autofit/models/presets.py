"""Presets: models known by name. Their figures are data, in presets.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autofit.core.errors import unknown
from autofit.core.strict_yaml import load_mapping
from autofit.models.huggingface import HuggingFaceModel


@dataclass(frozen=True)
class Preset:
    """A named architecture: its task, its size, where its weights are, and its config.json as a mapping."""

    name: str
    task: str
    parameters: int
    hub: str | None
    config: Mapping[str, Any]


@cache
def _presets() -> dict[str, Preset]:
    entries = load_mapping(Path(__file__).with_name("presets.yaml"))
    return {name: Preset(name=name, **entry) for name, entry in entries.items()}


def preset_names() -> tuple[str, ...]:
    """The names of all presets, in the order of the file."""
    return tuple(_presets())


def load_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: there is none; the message names the nearest one.
    """
    if name not in _presets():
        raise unknown("model", name, preset_names())
    return _presets()[name]


def preset_model(name: str) -> HuggingFaceModel:
    """The model of that name; raises as `load_preset`."""
    preset = load_preset(name)
    return HuggingFaceModel(name, preset.task, preset.config, {"kind": "preset", "model": name})


def describe_presets() -> list[dict[str, Any]]:
    """Name, task, parameters and hub id of every preset: what `autofit models --json` prints."""
    return [{key: getattr(each, key) for key in ("name", "task", "parameters", "hub")} for each in _presets().values()]
