"""Text from outside inside another language, where it stays text: one function for each language.

What others wrote (names, versions, notes, paths) passes one of these where it is known what it
becomes: in whatever writes the file, the page or the command. YAML's is `strict_yaml.dump`.
"""

import html
import os
import re
import shlex
from collections.abc import Iterable

# What moves a cursor, colours, or names a window.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)")
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in r"\`*_[]<>|#&~"})
_BEGINS_A_BLOCK = re.compile(r"^([0-9]+(?=[.)])|(?=[-+=]))")  # a list or an underlined title


def lines_of(text: str) -> list[str]:
    """The lines between line feeds: `str.splitlines` also splits where no file format does."""
    if not text:
        return []

    return text.removesuffix("\n").split("\n")


def printed(text: str) -> str:
    """For a terminal and for comments: no escapes, a space for what else cannot be printed."""
    signs = _ESCAPES.sub("", text)

    return "".join(sign if sign.isprintable() else " " for sign in signs)


def one_line(text: object) -> str:
    """The same with single spaces."""
    return " ".join(printed(str(text)).split())


def comment(lines: Iterable[str]) -> str:
    """A comment of YAML, Python or a shell."""
    rows = (f"# {printed(line)}".rstrip() for line in lines)
    return "".join(f"{row}\n" for row in rows)


def docstring(text: str) -> str:
    """Lines inside a Python docstring, below which its end has a line of its own."""
    lines = (printed(line).rstrip() for line in lines_of(text))
    return "\n".join(lines).replace("\\", "/").replace('"""', "'''")


def python_string(text: str) -> str:
    """A Python literal, in double quotes unless it holds some."""
    source = repr(text)
    if '"' in text or source[0] == '"':
        return source

    inner = source[1:-1].replace("\\'", "'")
    return f'"{inner}"'


def shell_word(text: str) -> str:
    """One word of a shell; control characters as bytes, which bash, zsh and POSIX 2024 read."""
    if text.isprintable():
        return shlex.quote(text)

    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which names no file
        data = text.encode(errors="replace")

    word = ""
    for byte in data:
        sign = chr(byte)
        is_plain = sign.isascii() and sign.isalnum()
        word += sign if is_plain else f"\\x{byte:02x}"
    return f"$'{word}'"


def shell_path(text: str) -> str:
    """The same of a path, which is no option whatever it begins with."""
    if text.startswith("-"):
        text = f"./{text}"

    return shell_word(text)


def xml_text(text: str) -> str:
    """Text that XML can hold, not yet escaped: ElementTree and Jinja do that."""
    return _NOT_IN_XML.sub(" ", text)


def html_text(text: str) -> str:
    """Text of HTML, or the value of an attribute."""
    return html.escape(xml_text(text))


def markdown_text(text: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    line = one_line(text).translate(_MARKDOWN)
    return _BEGINS_A_BLOCK.sub(r"\1\\", line)


def markdown_code(text: str, language: str = "") -> str:
    """A block of code, below a fence that is not in it."""
    lines = [printed(line) for line in lines_of(text)]
    fence = "```"
    while any(fence in line for line in lines):
        fence += "`"

    return "\n".join([f"{fence}{language}", *lines, fence])
