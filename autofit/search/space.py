"""Space: the values each knob may take in a search, read from YAML.

The techniques say what a knob may be on this hardware, through `KnobChoices`. Values keep the order
of the file, which runs from the least expected memory to the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError, shown, unknown
from autofit.core.files import expanded
from autofit.core.knobs import Knob, yaml_word
from autofit.core.strict_yaml import load_mapping
from autofit.search.enumeration import Enumeration

_KEYS = ("description", "knobs")
_ALL = "all"


@dataclass(frozen=True)
class KnobChoices:
    """What the techniques offer to a search of this workload on this hardware.

    Attributes:
        known: the knobs that can be searched.
        choices: the values of a knob that are worth searching here; None where the hardware is not
            known yet.
        check: raises InputError for a value that the knob never takes.
        possible: all values of a knob that are possible here, whether or not worth searching;
            default: `choices`.
        named: of the knobs that also take names, which no list of choices holds, the values that
            are none.
    """

    known: tuple[str, ...]
    choices: Callable[[str], tuple[Value, ...]] | None
    check: Callable[[str, Value], None]
    possible: Callable[[str], tuple[Value, ...]] | None = None
    named: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Space:
    """The values each knob may take in a search.

    Attributes:
        knobs: the values of each, expected memory rising; knobs that are absent are off.
    """

    name: str
    description: str
    knobs: dict[str, tuple[Value, ...]]

    def with_overrides(self, overrides: Mapping[str, Any], offer: KnobChoices) -> Space:
        """The space with some knobs replaced (`--set`): one value fixes a knob, several narrow it.

        A value the user names is kept even where the hardware does not offer it: whether it works
        is measured. Raises InputError for an unknown knob, a value that means nothing, none at all,
        or the same one twice.
        """
        knobs = dict(self.knobs)
        for knob, given in overrides.items():
            _check_knob(knob, offer)
            values = list(given) if isinstance(given, list | tuple) else [given]
            knobs[knob] = _checked(knob, values, offer, "--set")

        return replace(self, knobs=knobs)

    def configs(self, constraints: Constraints, seed: int = 0) -> tuple[Config, ...]:
        """The distinct canonical configs that are not refused, as `Enumeration.configs` gives them
        (or raises)."""
        return Enumeration(self.knobs, constraints).configs(seed)


@dataclass(frozen=True)
class SpaceFile:
    """A space that ships with autofit, unread but for its description."""

    name: str
    description: str
    path: Path


def list_spaces() -> tuple[SpaceFile, ...]:
    """The spaces that ship with autofit, by name."""
    files = []
    for name, path in _shipped().items():
        description, _ = _read(path)
        files.append(SpaceFile(name, description, path))

    return tuple(files)


def load_space(name_or_path: str | Path, offer: KnobChoices) -> Space:
    """Read a shipped space by its name, or a YAML file by its path, and keep what this hardware
    offers of it.

    Raises InputError for no such space, a file of another form, an unknown knob or value, or a knob
    without a value here.
    """
    shipped = _shipped()
    path = shipped.get(str(name_or_path), expanded(name_or_path, "the space"))
    if not path.is_file():
        raise unknown("space", str(name_or_path), shipped)

    description, listed = _read(path)
    knobs = {}
    for knob, given in listed.items():
        values = _offered(knob, given, offer, path)
        # What means nothing here, as the knobs of several devices do on one, is no part of the
        # space.
        if given != _ALL or values != (None,):
            knobs[knob] = values

    return Space(path.stem, description, knobs)


def check_asked(
    space: str | None,
    settings: Mapping[str, Any],
    known: tuple[str, ...],
    knobs: Mapping[str, Knob],
) -> None:
    """Raise the InputErrors of `load_space` and `with_overrides` that need no hardware, and of
    values of `knobs`."""

    def check(name: str, value: Value) -> None:
        if name in knobs:
            knobs[name].check(value)

    offer = KnobChoices(known, None, check)
    start = Space("", "", {}) if space is None else load_space(space, offer)
    start.with_overrides(settings, offer)


def _shipped() -> dict[str, Path]:
    """In a wheel the files lie inside the package, in a source checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    for parent in (package, package.parent):
        folder = parent / "search_spaces"
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}

    return {}


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The description of a file, and what it lists for each knob."""
    data = load_mapping(path)
    for key in data:
        if key not in _KEYS:
            raise unknown(f"key in {path}", key, _KEYS)

    description = data.get("description")
    if not isinstance(description, str) or not description.strip():
        raise InputError(
            f"{path} has no description.",
            "Add `description:` and say what the space allows.",
        )

    knobs = data.get("knobs")
    if not isinstance(knobs, dict) or not knobs or not all(isinstance(knob, str) for knob in knobs):
        raise InputError(
            f"{path} has no knobs.",
            "Add `knobs:` with a list of values, or all, for each knob.",
        )
    return description.strip(), knobs


def _offered(
    knob: str,
    given: Any,
    offer: KnobChoices,
    path: Path,
) -> tuple[Value, ...]:
    """The values of one knob of a file, as far as this hardware offers them.

    Args:
        given: what the file lists for the knob.
    """
    _check_knob(knob, offer)
    if given != _ALL and not isinstance(given, list):
        raise InputError(f"{path}: {knob} is {shown(given)}.", "Write a list of values, or all.")

    values = () if given == _ALL else _checked(knob, given, offer, str(path))
    if offer.choices is None:
        return values

    offered = offer.choices(knob)
    if given == _ALL:
        if not offered:
            raise InputError(
                f"{path}: nothing is offered for {knob} here.",
                "Leave the knob out.",
            )
        return offered

    # What users list they have asked for.
    is_shipped = path in _shipped().values()
    possible = offered if is_shipped or offer.possible is None else offer.possible(knob)
    listed = offer.named.get(knob)
    kept = tuple(
        value
        for value in values
        if _among(value, possible) or (listed is not None and not _among(value, listed))
    )
    if not kept:
        names = ", ".join(map(yaml_word, values))
        remedy = "Leave the knob out."
        if possible:
            remedy = f"Here it may be: {', '.join(map(yaml_word, possible))}."
        raise InputError(f"{path}: this hardware offers none of {names} for {knob}.", remedy)

    return kept


def _checked(
    knob: str,
    values: list[Any],
    offer: KnobChoices,
    source: str,
) -> tuple[Value, ...]:
    """Values that a user lists; raises InputError for those that the knob never takes.

    Args:
        source: where they are listed, for messages.
    """
    if not values:
        raise InputError(
            f"{source}: {knob} has no values.",
            "Give at least one, or leave the knob out.",
        )

    for index, value in enumerate(values):
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InputError(
                f"{source}: {knob} cannot be {shown(value)}.",
                "Give words, numbers or null.",
            )
        offer.check(knob, value)
        if _among(value, values[:index]):
            raise InputError(
                f"{source}: {knob} lists {yaml_word(value)} twice.",
                "List each value once.",
            )

    return tuple(values)


def _check_knob(knob: str, offer: KnobChoices) -> None:
    """Raise InputError for a knob that cannot be searched."""
    if knob not in offer.known:
        raise unknown("knob to search", knob, offer.known)


def _among(value: Value, values: Iterable[Value]) -> bool:
    """`in`, but 1 is not True and 0 is not False."""
    return any(value == other and type(value) is type(other) for other in values)
