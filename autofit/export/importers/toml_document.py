"""A TOML file of another tool, of which some values are changed and nothing else."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from autofit.core.errors import InputError, sentence


@dataclass(frozen=True)
class TomlDocument:
    """The text of a file, and what it says.

    Attributes:
        keys: its values by their names, whatever sections they are in: these say nothing to kohya's
            scripts.
    """

    text: str
    keys: Mapping[str, Any]

    @classmethod
    def of(cls, text: str, name: str) -> "TomlDocument":
        """Read a text; `name` is what errors call it.

        Raises:
            InputError: it is no TOML, or has a key in two sections.
        """
        try:
            tree = tomlkit.parse(text)
        except TOMLKitError as error:
            message = f"{name} holds no valid TOML: {sentence(error)}."
            raise InputError(message, "Correct it.") from error

        keys: dict[str, Any] = {}
        for section in _sections(tree):
            for key, value in section.unwrap().items():
                if key in keys:
                    raise InputError(f"{name} says {key} twice.", "Leave one of them.")
                if not isinstance(value, dict):
                    keys[key] = value
        return cls(text, keys)

    def changed(self, values: Mapping[str, Any]) -> str:
        """The text with other values: comments, order and sections stay, and new keys come at the
        end."""
        tree = tomlkit.parse(self.text)
        sections = _sections(tree)
        for key, value in values.items():
            section = next((each for each in sections if key in each), sections[-1])
            section[key] = value
        return tomlkit.dumps(tree)


def _sections(tree: tomlkit.TOMLDocument) -> list[Any]:
    """The whole, and the tables in it."""
    return [tree, *(value for value in tree.values() if isinstance(value, MutableMapping))]
