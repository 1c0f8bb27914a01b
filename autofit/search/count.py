"""How many different legal Configs a space holds: counted one by one where that is quick, estimated where it is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.search.space import Space

_ENUMERATED = 10_000  # combinations up to which every one is looked at: about a second
_SAMPLES = 6_000  # with one legal in ten, the estimate's standard error is 4 %


@dataclass(frozen=True)
class Count:
    """The number of legal configs, and whether it was counted or estimated from a sample."""

    configs: int
    exact: bool


def count_configs(
    space: Space,
    settle: Callable[[Mapping[str, Any]], Config],
    refuse: Callable[[Config], str | None],
    *,
    seed: int = 0,
    samples: int = _SAMPLES,
) -> Count:
    """The distinct canonical configs of a space that are not refused.

    Estimated as the share of combinations that are such a config, times all combinations, where each knob also takes
    the values that settling gives it (null targets at rank 0): every config is then exactly one combination.
    """
    if _size(space) > _ENUMERATED:
        space = space.of_working_values(settle, refuse, seed)  # whose legal configs are the same, and less rare
    if _size(space) <= _ENUMERATED:
        legal = [config for config in space.configs(settle) if refuse(config) is None]
        return Count(len(legal), exact=True)
    draw = random.Random(seed)
    values = _with_settled_values(space, settle, draw, samples // 10)
    combinations = [{knob: draw.choice(each) for knob, each in values.items()} for _ in range(samples)]
    legal_ones = sum(_is_config(combination, space, settle, refuse) for combination in combinations)
    total = math.prod(len(each) for each in values.values())
    return Count(round(total * legal_ones / samples), exact=False)


def _size(space: Space) -> int:
    return math.prod(len(values) for values in space.knobs.values())


def _with_settled_values(
    space: Space, settle: Callable[[Mapping[str, Any]], Config], draw: random.Random, samples: int
) -> dict[str, tuple[Value, ...]]:
    """The values each knob takes in canonical configs: those listed, and those that settling was seen to give it."""
    seen = {knob: dict.fromkeys(listed) for knob, listed in space.knobs.items()}
    for _ in range(samples):
        config = _settled({knob: draw.choice(listed) for knob, listed in space.knobs.items()}, settle)
        for knob, values in seen.items():
            if config is not None:
                values.setdefault(config[knob])
    return {knob: tuple(values) for knob, values in seen.items()}


def _is_config(
    combination: dict[str, Value],
    space: Space,
    settle: Callable[[Mapping[str, Any]], Config],
    refuse: Callable[[Config], str | None],
) -> bool:
    """Whether a combination is a canonical config that the space leads to, and a legal one."""
    config = _settled(combination, settle)
    if config is None or any(config[knob] != value for knob, value in combination.items()):
        return False
    listed = {
        knob: value if value in space.knobs[knob] else space.knobs[knob][0] for knob, value in combination.items()
    }
    return (listed == combination or _settled(listed, settle) == config) and refuse(config) is None


def _settled(combination: Mapping[str, Any], settle: Callable[[Mapping[str, Any]], Config]) -> Config | None:
    try:
        return settle(combination)
    except InputError:  # knobs that contradict each other
        return None
