"""Text from outside as part of another language, where it stays a string or a comment: one function for each language.

What others wrote (names, versions, notes, paths) passes one of these where it is known what it becomes: in whatever
writes the file, the page or the command. YAML's is `strict_yaml.dump`.
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
_BEGINS_A_BLOCK = re.compile(r"([-+=]|[0-9]+(?=[.)]))")  # a list or an underlined title, at the start of a line


def lines_of(text: str) -> list[str]:
    """The lines between the line feeds: Python's `splitlines` also splits where no file format does."""
    return text.removesuffix("\n").split("\n") if text else []


def printed(text: str) -> str:
    """For a terminal and for comments: without escapes, what cannot be printed is a space; line feeds are none."""
    return "".join(sign if sign.isprintable() else " " for sign in _ESCAPES.sub("", text))


def one_line(text: object) -> str:
    """The same with single spaces."""
    return " ".join(printed(str(text)).split())


def comment(lines: Iterable[str]) -> str:
    """A comment of YAML, Python or a shell."""
    return "".join(f"# {printed(line)}".rstrip() + "\n" for line in lines)


def docstring(text: str) -> str:
    """Lines inside a Python docstring, below which its end has a line of its own."""
    lines = (printed(line).rstrip() for line in lines_of(text))
    return "\n".join(lines).replace("\\", "/").replace('"""', "'''")


def python_string(text: str) -> str:
    """A Python literal, in double quotes unless it holds some."""
    source = repr(text)
    return source if '"' in text or source[0] == '"' else '"' + source[1:-1].replace("\\'", "'") + '"'


def shell_word(text: str) -> str:
    """One word of a shell; control characters by their bytes, as bash, zsh and POSIX 2024 read them."""
    if text.isprintable():
        return shlex.quote(text)
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which names no file
        data = text.encode(errors="replace")
    signs = (chr(byte) if byte < 128 and chr(byte).isalnum() else f"\\x{byte:02x}" for byte in data)
    return f"$'{''.join(signs)}'"


def shell_path(text: str) -> str:
    """The same of a path, which is no option whatever it begins with."""
    return shell_word(f"./{text}" if text.startswith("-") else text)


def xml_text(text: str) -> str:
    """Text that XML can hold, not yet escaped: ElementTree and Jinja do that."""
    return _NOT_IN_XML.sub(" ", text)


def html_text(text: str) -> str:
    """Text of HTML, or the value of an attribute."""
    return html.escape(xml_text(text))


def markdown_text(text: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    line = one_line(text).translate(_MARKDOWN)
    begins = _BEGINS_A_BLOCK.match(line)
    if begins is None:
        return line
    sign = begins.end() if begins[1].isdigit() else 0
    return f"{line[:sign]}\\{line[sign:]}"


def markdown_code(text: str, language: str = "") -> str:
    """A block of code, below a fence that is not in it."""
    lines = [printed(line) for line in lines_of(text)]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *lines, fence])
