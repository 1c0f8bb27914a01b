"""The keys that each tool takes, from its own sources: a key that a file has and its tool does not
know is named, since the tool would pass over it or refuse the file."""

import difflib
import functools
from collections.abc import Iterable
from pathlib import Path

from autofit.export.importers.command_line import ENVIRONMENT, LAUNCHER


@functools.cache
def known_keys(tool: str) -> tuple[str, frozenset[str]]:
    """The version of a tool that was asked, such as "axolotl 0.19.0", and the keys that it takes.

    Args:
        tool: the name of an exporter, such as "axolotl".
    """
    path = Path(__file__).parent / f"{tool}.txt"
    head, *names = path.read_text(encoding="utf-8").splitlines()
    version, _, _ = head.removeprefix("# ").partition(",")

    return version, frozenset(names)


def note_on_unknown(tool: str, keys: Iterable[str]) -> str | None:
    """A sentence that names the keys of a file that its tool does not know; None where it knows
    all.

    Args:
        keys: with dots for keys in others, of which the outermost is looked up.
    """
    version, known = known_keys(tool)
    named = []
    own = [key for key in keys if not key.startswith((ENVIRONMENT, LAUNCHER))]
    for key in dict.fromkeys(key.partition(".")[0] for key in own):
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        named.append(f"{key} ({near[0]}?)" if near else key)

    if not named:
        return None
    if len(named) == 1:
        return f"{version} does not know the key {named[0]}; it stays as it is."

    return f"{version} does not know the keys {', '.join(named)}; they stay as they are."
