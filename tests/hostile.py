"""Hostile texts, and what is left of a file when all strings and comments in it are taken as one."""

import ast
import html.parser
import json
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import yaml
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

# What ends a line, a string or a comment somewhere, and what no format holds.
HOSTILE = (
    *("\n", "\r", "\t", "\0", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"),
    *("\ud800", "\ufeff", "\u202e", "\uffff", "\x1b[31m", "\x1b]0;title\x07", "\x9b2J"),
    *(
        "\\",
        "'",
        '"',
        '"""',
        "'''",
        "#",
        ": ",
        "- ",
        "1. ",
        "===",
        "--x",
        "$x",
        "%s",
        "{",
        "}",
        "{file}",
    ),
    *(
        "`",
        "```\n",
        "~~~",
        "|",
        "*",
        "_",
        "[a](b)",
        "<b>",
        "</details>",
        "<!--",
        "-->",
        "]]>",
        "&lt;",
    ),
    *(
        "\nimport os\n",
        "\u2028import os\u2028#",
        "\nx: y\n",
        "</script>",
        "\u6a21",
        "\U0001f600",
        " ",
        "a",
    ),
)
EVERYTHING = "".join(HOSTILE)  # among few examples this one is sure to hold what breaks out
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=3), max_size=8).map("".join)
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def replaced(data: Any, words: Callable[[str], str]) -> Any:
    """Plain data with other words in the place of its texts and keys."""
    if isinstance(data, str):
        return words(data)
    if isinstance(data, dict):
        return {words(key): replaced(value, words) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(replaced(each, words) for each in data)
    return data


def strings(data: Any) -> Iterator[str]:
    """Every text in plain data, keys among them."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for pair in data.items():
            yield from strings(list(pair))
    elif isinstance(data, list):
        for each in data:
            yield from strings(each)


def parsed(name: str, text: str) -> Any:
    """A file by the language of its name, as data: of Python its syntax tree, of Markdown its tokens."""
    if name.endswith(".py"):
        return _of_python(ast.parse(text))
    if name.endswith(".md"):
        return list(_of_markdown(MARKDOWN.parse(text)))
    data = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    data.pop("_comment", None)
    return data


def _of_python(node: Any) -> Any:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return "docstring"
    if isinstance(node, ast.Constant):
        return [type(node.value).__name__, node.value]
    if isinstance(node, ast.AST):
        return {type(node).__name__: [_of_python(child) for _, child in ast.iter_fields(node)]}
    return [_of_python(each) for each in node] if isinstance(node, list) else node


def _of_markdown(tokens: list[Token]) -> Iterator[list[str]]:
    for token in tokens:
        shown = token.type in ("text", "fence")
        yield [token.type, "" if shown or token.children else token.content]
        yield from _of_markdown(token.children or [])


class Page(html.parser.HTMLParser):
    """The tags of a page with those of their attributes that decide what is done, not what is shown."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[tuple[str, tuple[tuple[str, str | None], ...]]] = set()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, deciding(dict(attrs))))
        self.open.append(tag)

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() and self.open[-1] in ("script", "style"):
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


_SHOWN = ("title", "aria-label", "data-key", "content", "alt", "viewbox", "viewBox")
_FIGURES = (
    "style",
    "d",
    "x",
    "y",
    "x1",
    "x2",
    "y1",
    "y2",
    "cx",
    "cy",
    "r",
    "width",
    "height",
    "text-anchor",
)


def deciding(attributes: dict[str, str | None]) -> tuple[tuple[str, str | None], ...]:
    """Attributes without the values that are shown, or depend on how long words are."""
    given = attributes.items()
    return tuple(
        sorted((name, None if name in (*_SHOWN, *_FIGURES) else value) for name, value in given)
    )


def elements(document: str) -> set[tuple[str, tuple[tuple[str, str | None], ...]]]:
    """The elements of an XML document and their attributes, as of `Page`."""
    return {
        (each.tag, deciding(dict(each.attrib)))
        for each in ElementTree.fromstring(document.encode()).iter()
    }
