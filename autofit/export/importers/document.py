"""A YAML or JSON file of another tool, of which some values are changed and nothing else."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autofit.core.errors import InputError
from autofit.core.strict_yaml import dump, parse
from autofit.export.tool import nested

# Lists of mappings that are read as mappings by number: those that ai-toolkit's jobs hold.
_LISTS = ("config.process", "config.process.0.datasets")


@dataclass(frozen=True)
class Document:
    """The text of a file, and what it says.

    Attributes:
        keys: its values by their path (`fsdp_config.offload_params`, `config.process.0.type`).
    """

    text: str
    keys: Mapping[str, Any]

    @classmethod
    def of(cls, text: str, name: str) -> "Document":
        """Read a text; `name` is what errors call it.

        Raises:
            InputError: it is no YAML mapping, or has tags or a key twice.
        """
        value = parse(text, name)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            kind = type(value).__name__
            raise InputError(f"{name} should hold a mapping of names to values, not {kind}.")

        return cls(text, flat(value))

    @property
    def is_json(self) -> bool:
        """Whether names and words are in quotes, and all is inside of braces."""
        return self.text.lstrip().startswith("{")

    def changed(self, values: Mapping[str, Any]) -> str:
        """The text with other values: comments, order and quotes stay, new keys come at the end, or
        first in the mapping that they are of.

        Where a value has an anchor, what refers to it keeps what it says: by a value of its own.
        """
        whole = _without_aliases(self.text)
        if whole == self.text:
            return self._edited(values)

        try:
            text = self._edited(values)
            if Document.of(text, "the changed file").keys == self._expected(values):
                return text
        except InputError:  # an anchor that is referred to is gone
            pass

        return Document(whole, self.keys)._edited(values)

    def _expected(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the changed text is to say."""
        kept = {
            key: value
            for key, value in self.keys.items()
            if not any(f"{key}.".startswith(f"{path}.") for path in values)
        }

        return kept | flat(values)

    def _edited(self, values: Mapping[str, Any]) -> str:
        places = _Places.of(self.text)
        edits: list[tuple[int, int, str]] = []
        new: dict[str, Any] = {}
        for path, value in values.items():
            written = scalar(value)
            if self.is_json:
                written = json.dumps(value)

            parent, _, name = path.rpartition(".")
            if path in places.values:
                start, stop = places.values[path]
                if self.text[start - 1] == ":":
                    written = f" {written}"
                edits.append((start, stop, written))
            elif parent in places.mappings:
                start, between = places.mappings[parent]
                if self.is_json:
                    name = json.dumps(name)
                edits.append((start, start, f"{name}: {written}{between}"))
            else:
                new[path] = value

        line_end = "\n"
        if "\r\n" in self.text:
            line_end = "\r\n"

        text = self.text
        for start, stop, written in sorted(edits, reverse=True):
            text = text[:start] + written.replace("\n", line_end) + text[stop:]

        if not new:
            return text
        if not text.endswith("\n"):
            text += line_end
        return text + dump(nested(new)).replace("\n", line_end)


@dataclass(frozen=True)
class _Places:
    """Where things stand in a text: the begin and the end of each value by its path, a mapping's
    from the colon before it on; of each mapping inside another the begin of its first key, and what
    stands between two of its keys."""

    values: dict[str, tuple[int, int]]
    mappings: dict[str, tuple[int, str]]

    @classmethod
    def of(cls, text: str) -> "_Places":
        found = cls({}, {})
        root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        if root.flow_style and root.value:
            found.mappings[""] = _begin(text, root)
        found._visit(text, root, "")

        return found

    def _visit(self, text: str, mapping: Any, prefix: str) -> None:
        """Note where the values of a mapping stand, and those of mappings inside."""
        for key, value in mapping.value:
            path = f"{prefix}{key.value}"
            start, stop = _extent(text, value)
            if isinstance(value, yaml.MappingNode) and value.value:
                self.mappings[path] = _begin(text, value)
                self._visit(text, value, f"{path}.")
                colon = text.index(":", key.end_mark.index) + 1
                if not text[colon:start].strip():  # no comment stands between
                    start = colon

            elif isinstance(value, yaml.SequenceNode) and path in _LISTS:
                for number, item in enumerate(value.value):
                    if isinstance(item, yaml.MappingNode) and item.value:
                        self.mappings[f"{path}.{number}"] = _begin(text, item)
                        self._visit(text, item, f"{path}.{number}.")

            self.values[path] = (start, stop)


def _without_aliases(text: str) -> str:
    """The text with what each alias stands for in its place."""
    loader = yaml.SafeLoader(text)
    nodes = {node.start_mark.index: node for node in _nodes(loader.get_single_node())}

    edits = []
    anchored: dict[str, Any] = {}
    events: Iterator[Any] = yaml.parse(text, Loader=yaml.SafeLoader)
    for event in events:
        name: Any = getattr(event, "anchor", None)
        start = event.start_mark.index
        stop = event.end_mark.index
        if isinstance(event, yaml.AliasEvent):
            value = loader.construct_document(anchored[name])
            edits.append((start, stop, scalar(value)))
        elif name:
            anchored[name] = nodes[start]

    for start, stop, written in reversed(edits):
        text = text[:start] + written + text[stop:]

    return text


def _nodes(node: Any) -> Iterator[Any]:
    """A node, and all that are inside; of those that begin at one place the innermost comes last."""
    yield node
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for child in pair:
                yield from _nodes(child)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from _nodes(child)


def _extent(text: str, node: Any) -> tuple[int, int]:
    """Where a value begins and ends: one of several lines with the last of what it holds, before
    comments that follow."""
    last = node
    while not isinstance(last, yaml.ScalarNode) and not last.flow_style and last.value:
        last = last.value[-1]
        if isinstance(last, tuple):
            _, last = last

    start = node.start_mark.index
    written = text[start : last.end_mark.index].rstrip()

    return start, start + len(written)


def _begin(text: str, mapping: Any) -> tuple[int, str]:
    """Where the first key of a mapping begins, and what stands between two keys."""
    first_key, _ = mapping.value[0]
    start = first_key.start_mark.index
    column = first_key.start_mark.column

    between = " "
    before = text[start - column : start]
    if not before.strip():  # the key has a line of its own
        between = "\n" + " " * column
    if mapping.flow_style:
        between = f",{between}"
    return start, between


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by their path; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, list) and path in _LISTS:
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{path}.")
        else:
            found[path] = value

    return found


def scalar(value: Any) -> str:
    """A value as YAML within a line, as PyYAML reads it."""
    written: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return written.removesuffix("\n").removesuffix("\n...")
