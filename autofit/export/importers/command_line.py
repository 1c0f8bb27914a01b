"""A command that trains, in a shell script or alone, of which some options are changed and nothing
else.

The script is read, never run: variables are filled in where it sets them itself, and
`$(expr 16 / $n)` is worked out. What only the machine knows stays as it is written.
"""

import itertools
import json
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from autofit.core.errors import InputError
from autofit.export.importers.document import flat
from autofit.export.tool import nested

# What a script is made of: words, and what stands between two commands or two words.
_PARTS = re.compile(
    r"""
    (?P<space>(?:[ \t\r]|\\\r?\n)+)
    | (?P<comment>\#[^\n]*)
    | (?P<end>[\n;]|&&?|\|\|?|\d?>>?&?|<)
    | (?P<word>(?:[^\s'"\\;&|<>$`()]
        | \\. | '[^']*' | "(?:[^"\\]|\\.)*"
        | \$\(\((?:[^()])*\)\) | \$\((?:[^()])*\) | \$\{[^}]*\} | \$ | `[^`]*` | [()])+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ASSIGNED = re.compile(r"(?:[A-Za-z_]\w*)=")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
# From left to right, as for a product or a quotient of several numbers.
_SUM = re.compile(r"\$\(\(({0})\)\)|\$\(expr ({0})\)|`expr ({0})`".format(r"[\d */+-]+"))
_TERM = re.compile(r"([*/+-]?) *(\d+)")
_SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
_NUMBER = re.compile(r"-?[\d.]+(?:e-?\d+)?")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
ENVIRONMENT, LAUNCHER = "ENV.", "launcher."  # before the keys of what a command is started with
COMMAND = f"{LAUNCHER}command"  # what trains, as words with a space between
_BETWEEN = " \t\r\n\\"  # two options
_PYTHON = "python"  # the tool of scripts that go by their own names; their switches take no value
_LAUNCHERS = ("accelerate", "torchrun", "deepspeed")


@dataclass(frozen=True)
class _Word:
    start: int
    stop: int
    written: str


@dataclass(frozen=True)
class CommandLine:
    """A text with one command that trains.

    Attributes:
        program: the tool and what it is to do: ("swift", "sft").
        keys: the values of its options, of variables set before it (`ENV.NPROC_PER_NODE`) and of
            options of what starts it (`launcher.config_file`).
    """

    text: str
    program: tuple[str, str]
    keys: Mapping[str, Any]
    _places: Mapping[str, tuple[int, int]]
    _begin: int  # of the command, behind the variables that are set for it
    _end: int

    @classmethod
    def of(cls, text: str, name: str, programs: Sequence[tuple[str, str]]) -> "CommandLine":
        """Read a text; `name` is what errors call it.

        Args:
            programs: the commands that train.

        Raises:
            InputError: none of them is there, or several are, or the options stand in a file.
        """
        variables: dict[str, str] = {}
        found: list[CommandLine] = []
        for words in _commands(text):
            command = _command(text, words, variables, programs)
            if command is not None:
                found.append(command)

        if len(found) == 1:
            return found[0]
        titles = ", ".join(" ".join(program) for program in programs)
        if not found:
            message = f"{name} has no command that trains, such as {titles}."
            raise InputError(message, "Give the file or the command that the tool trains by.")

        message = f"{name} has {len(found)} commands that train."
        raise InputError(message, "Give one of them: autofit tune -- COMMAND.")

    def changed(self, values: Mapping[str, Any]) -> str:
        """The text with other values; new options come last in the command, and variables are set
        before it."""
        edits: list[tuple[int, int, str]] = []
        options: dict[str, Any] = {}
        for key, value in values.items():
            if key.startswith(ENVIRONMENT):
                assigned = f"{key.removeprefix(ENVIRONMENT)}={shlex.quote(str(value))} "
                edits.append((self._begin, self._begin, assigned))
            else:
                options[key] = value

        for key, value in self._whole(options).items():
            option = self._option(key, value)
            if key in self._places:
                start, stop = self._places[key]
                if not option:
                    start = len(self.text[:start].rstrip(_BETWEEN))
                edits.append((start, stop, option))
            elif option:
                edits.append((self._end, self._end, self._between() + option))

        text = self.text
        edits.sort(key=lambda edit: edit[0], reverse=True)
        for start, stop, written in edits:
            text = text[:start] + written + text[stop:]
        return text

    def _whole(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by option: of one that holds a mapping, with all else that it holds."""
        found: dict[str, Any] = {}
        for path, value in values.items():
            option, _, inside = path.partition(".")
            if inside:
                below = [key for key in self.keys if key.startswith(f"{option}.")]
                whole = {key: self.keys[key] for key in below}
                value = nested({**whole, path: value})[option]

            found[option] = value

        return found

    def _option(self, name: str, value: Any) -> str:
        """An option with its value, as a shell takes it; nothing where a switch is off."""
        if self.program[0] == _PYTHON and isinstance(value, bool):
            return f"--{name}" if value else ""

        values = value
        if not isinstance(value, list):
            values = [value]
        return " ".join([f"--{name}", *map(_quoted, values)])

    def _between(self) -> str:
        """What stands between two options of this command."""
        options = sorted(self._places.values())
        for (_, stop), (start, _) in itertools.pairwise(options):
            if "\n" in self.text[stop:start]:
                return self.text[stop:start]

        return " "


def command_text(words: Sequence[str]) -> str:
    """The words of a command as a text, an option a line."""
    lines: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"

    return " \\\n    ".join(lines) + "\n"


def _commands(text: str) -> list[list[_Word]]:
    """The words of each command, with where they stand."""
    commands: list[list[_Word]] = [[]]
    at = 0
    while at < len(text):
        part = _PARTS.match(text, at)
        if part is None:  # a quote that is not closed
            at += 1
            continue

        at = part.end()
        if part["end"]:
            commands.append([])
        elif part["word"]:
            commands[-1].append(
                _Word(
                    part.start(),
                    part.end(),
                    part["word"],
                )
            )

    return [words for words in commands if words]


def _command(
    text: str,
    words: Sequence[_Word],
    variables: dict[str, str],
    programs: Sequence[tuple[str, str]],
) -> CommandLine | None:
    """The command of some words, if it trains; what they set is noted in `variables`."""
    values = [_filled(word.written, variables) for word in words]
    if values[0] == "export":
        words = words[1:]
        values = values[1:]

    assigned = list(itertools.takewhile(_ASSIGNED.match, values))
    set_here = dict(value.split("=", 1) for value in assigned)
    first = len(assigned)  # the place of the word that starts it
    if first == len(values):
        variables.update(set_here)
        return None

    program = None
    before = ""
    at = first
    while at < len(values) and program is None:
        program = _program(before, values[at], programs)
        before = values[at]
        at += 1

    if program is None:
        return None

    keys: dict[str, Any] = {}
    for name, value in {**variables, **set_here}.items():
        keys[ENVIRONMENT + name] = _typed(value)

    starts, _ = _options(words[first : at - 1], values[first : at - 1])
    for option, value in starts.items():
        keys[LAUNCHER + option] = value
    if values[first] in _LAUNCHERS:
        keys[f"{LAUNCHER}program"] = values[first]
    keys[COMMAND] = " ".join(program)

    own, places = _options(words[at:], values[at:])
    if not own and at < len(values):
        message = f"the options of {' '.join(program)} are in {values[at]}."
        raise InputError(message, "Tune that file.")

    keys |= flat(own)
    return CommandLine(text, program, keys, places, words[first].start, words[-1].stop)


def _program(
    before: str,
    word: str,
    programs: Sequence[tuple[str, str]],
) -> tuple[str, str] | None:
    """The program that a word names: as `swift sft`, swift/cli/sft.py, -m swift.cli.sft, -m
    trl.scripts.sft, or sdxl_train_network.py, of which the tool is python."""
    path = PurePosixPath(word)
    for tool, does in programs:
        is_command = word == does and PurePosixPath(before).name == tool
        is_script = path.name == f"{does}.py" and tool in (*path.parts, _PYTHON)
        is_module = word in (f"{tool}.cli.{does}", f"{tool}.scripts.{does}")
        if is_command or is_script or is_module:
            return tool, does

    return None


def _options(
    words: Sequence[_Word],
    values: Sequence[str],
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The values of options, and where each stands with its name."""
    places: dict[str, tuple[int, int]] = {}
    given: dict[str, list[Any]] = {}
    name = ""
    for word, value in zip(words, values, strict=True):
        if value.startswith("--"):
            name, joined, rest = value[2:].partition("=")
            name = name.replace("-", "_")
            places[name] = (word.start, word.stop)
            given[name] = []
            if joined:
                given[name].append(_typed(rest))
        elif value.startswith("-") and not _NUMBER.fullmatch(value):
            name = ""  # an option of one letter, which is not known
        elif name:
            start, _ = places[name]
            places[name] = (start, word.stop)
            given[name].append(_typed(value))

    found: dict[str, Any] = {}
    for name, several in given.items():
        found[name] = several
        if not several:
            found[name] = True
        elif len(several) == 1:
            found[name] = several[0]

    return found, places


def _filled(written: str, variables: Mapping[str, str]) -> str:
    """A word as the shell hands it on, with what is known of variables and sums."""

    def known(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        default = match[2]
        if default is None:
            default = match[0]
        return variables.get(name, default)

    if written.startswith("'"):
        return written.strip("'")

    value = _VARIABLE.sub(known, written)
    value = _SUM.sub(_worked_out, value)
    if "$" in value or "`" in value:
        return value.strip('"')

    try:
        return "".join(shlex.split(value))
    except ValueError:
        return value


def _worked_out(match: re.Match[str]) -> str:
    """What a sum comes to, from left to right; the sum itself where it comes to nothing."""
    terms = _TERM.findall(match[1] or match[2] or match[3])
    if not terms:
        return match[0]

    result = 0
    for sign, digits in terms:
        number = int(digits)
        if sign == "/" and number == 0:
            return match[0]
        result = _SIGNS[sign or "+"](result, number)

    return str(result)


def _typed(word: str) -> Any:
    """A word as the value that it stands for."""
    lowered = word.lower()
    if lowered in _WORDS:
        return _WORDS[lowered]

    kinds: list[Callable[[str], Any]] = [int, float]
    if word.startswith(("{", "[")):
        kinds = [json.loads]
    for kind in kinds:
        try:
            return kind(word)
        except ValueError:
            continue

    return word


def _quoted(value: Any) -> str:
    """A value as a word of a shell."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    return shlex.quote(str(value))
