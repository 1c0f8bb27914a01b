"""The tools' own parsers on files before and after they were tuned: `python -m
benchmarks.exports.corpus_parsers axolotl --python PATH --before DIRECTORY --after DIRECTORY`.

PATH is the interpreter of an environment as tests/export/tools/environments.py describes it. Every
file below the second directory was tuned from the one of that name in the first. With `--results`
each is kept as JSON: what the parser said of both, or null. A file that it refused before it was
tuned is counted apart; any other that it refuses makes the exit code 1. Rows of other files, from
earlier runs, stay.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from autofit.export.importers import document_of
from autofit.export.importers.command_line import CommandLine
from autofit.export.tool import nested

PARSERS = Path(__file__).parents[2] / "tests" / "export" / "tools" / "own_parsers"
TOOLS = ("axolotl", "llamafactory", "msswift", "transformers", "trl")
_NOT_OPTIONS = ("ENV.", "launcher.")


def refusals(tool: str, python: Path, files: list[Path]) -> dict[Path, str | None]:
    """What the tool's parser refuses each file for, or None.

    Raises:
        subprocess.CalledProcessError: the parser cannot be run there.
    """
    command = [python, "-P", PARSERS / "run.py", PARSERS / f"parse_{tool}.py", "--users", *files]
    # Nothing of this tree, and no network.
    variables = {**os.environ, "DS_BUILD_OPS": "0", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True, env=variables
    )

    found: dict[Path, str | None] = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"file"'):
            row = json.loads(line)
            found[Path(row["file"])] = row["error"]
    return found


def as_yaml(path: Path, folder: Path) -> Path:
    """A file that a parser reads: of a script the options of its command, as YAML."""
    if path.suffix != ".sh":
        return path

    document = document_of(path.read_text(), path.name)
    assert isinstance(document, CommandLine)
    options = nested(
        {key: value for key, value in document.keys.items() if not key.startswith(_NOT_OPTIONS)}
    )
    written = folder / f"{path.stem}.yaml"
    title = " ".join(document.program)
    written.write_text(f"# {title}\n{yaml.safe_dump(options, sort_keys=False)}")
    return written


def judged(before: str | None, after: str | None) -> str:
    """What becomes of a file: "taken", "refused before" or "refused"."""
    if after is None:
        return "taken"
    return "refused" if before is None else "refused before"


def rows(tool: str, python: Path, before: Path, after: Path) -> list[dict[str, Any]]:
    """What the parser says of each tuned file, and of the file that it was."""
    names = sorted(str(path.relative_to(after)) for path in after.rglob("*") if path.is_file())
    with tempfile.TemporaryDirectory() as place:
        read: dict[str, list[Path]] = {}
        for name in names:
            read[name] = []
            for number, directory in enumerate((before, after)):
                folder = Path(place) / str(number)
                folder.mkdir(exist_ok=True)
                read[name].append(as_yaml(directory / name, folder))

        said = refusals(tool, python, [path for pair in read.values() for path in pair])
        found = []
        for name, pair in read.items():
            found.append({"file": name, "before": said[pair[0]], "after": said[pair[1]]})
    return found


def keep(found: list[dict[str, Any]], results: Path) -> None:
    """Write rows in place of those of the same files, beside those of others."""
    lines = results.read_text().splitlines() if results.exists() else []
    known = {row["file"]: row for row in map(json.loads, lines)}
    known |= {row["file"]: row for row in found}
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("".join(f"{json.dumps(row)}\n" for row in known.values()))


def main(arguments: list[str] | None = None) -> int:
    """Print the files that the parser refuses, and how many there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter with the tool")
    parser.add_argument("--before", type=Path, required=True, help="the files as they were")
    parser.add_argument("--after", type=Path, required=True, help="the tuned ones")
    parser.add_argument("--results", type=Path, help="JSON lines: what was said of each file")
    args = parser.parse_args(arguments)

    counts: collections.Counter[str] = collections.Counter()
    found = rows(args.tool, args.python, args.before, args.after)
    for row in found:
        verdict = judged(row["before"], row["after"])
        counts[verdict] += 1
        if verdict != "taken":
            print(f"{verdict:15} {row['file']}: {row['after']}")
    if args.results:
        keep(found, args.results)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return 1 if counts["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
