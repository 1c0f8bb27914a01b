"""Published files of other tools, read and tuned by prediction: `python -m benchmarks.exports.corpus DIRECTORY`.

Every file below the directory is read as `autofit tune` reads it, or refused in a sentence. With
`--gpu-mem GIB` those that are read are tuned, too: the tuned file must say something else in the
reported keys alone. Files that divide over devices and do not say how many are taken to be for
`--devices`. With `--output` the tuned files are kept.

Prints a line for each and counts at the end; an answer that is neither is a fault, and makes the
exit code 1. With `--results` each line is also kept as JSON, beside the card that it was for. A
file of which that says "tuned" or "refused" is not tried again, nor one without an answer for the
same card and limit, so that a run that was stopped goes on, and files that need a larger card or
more time get it in a second run. Files that those name, as from where their tools are started, are
looked for below `--beside`.
"""

import argparse
import collections
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.api.tool_file import DevicesMissingError, Reading, read
from autofit.api.tune import save, tune
from autofit.core.errors import AutofitError, InputError
from autofit.export.importers import document_of
from autofit.export.importers.document import flat

BESIDE = Path(__file__).with_name("corpus_beside")
SUFFIXES = (".yaml", ".yml", ".json", ".sh")


@dataclass(frozen=True)
class Assumed:
    """What is taken for granted of files that do not say it.

    Attributes:
        devices: of files that are for several; or how many machines.
        model, seq_len: of files whose script has them.
    """

    devices: int = 4
    model: str | None = None
    seq_len: int | None = None


def outcome(
    path: Path,
    gpu_mem: float | None,
    assumed: Assumed,
    output: Path | None = None,
    time_limit: float | None = None,
) -> tuple[str, str]:
    """("read" | "tuned" | "refused" | "no answer" | "fault", what is said of it).

    Args:
        assumed: of a file that does not say it.
        output: where the tuned file is written.
        time_limit: seconds for the search.
    """
    try:
        found, given = read_assuming(path, assumed)
    except InputError as error:
        return "refused", error.message

    if gpu_mem is None:
        world = found.there.world
        several = f", {world} devices" if world > 1 else ""
        assumed_so = " (given)" if given else ""
        return "read", f"{found.importer.tool.title}, {found.before.model}{several}{assumed_so}"
    begun = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as run:
            tuned = tune(path, gpu_mem=gpu_mem, time_limit=time_limit, out=run, **given)
    except AutofitError as error:
        return "no answer", str(error)
    more = unreported(found, tuned.changes, tuned.text, path.name)
    if more:
        return "fault", f"{', '.join(more)} changed as well"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        save(tuned, output)
    keys = ", ".join(tuned.changes)
    return "tuned", f"{time.monotonic() - begun:.0f} s: {keys or 'nothing to change'}"


def files_below(directory: Path) -> list[Path]:
    """The files that a tool may train by."""
    return sorted(path for path in directory.absolute().rglob("*") if path.suffix in SUFFIXES)


def read_assuming(path: Path, assumed: Assumed) -> tuple[Reading, dict[str, Any]]:
    """A file, and what was given that it does not say.

    Raises:
        InputError: it cannot be tuned.
    """
    given: dict[str, Any] = {}
    of_script = {"model": assumed.model, "seq_len": assumed.seq_len}
    while True:
        try:
            return read(path, **given), given
        except DevicesMissingError as error:
            what = "nodes" if "machines" in error.message else "devices"
            given[what] = max(assumed.devices, error.multiple)
        except InputError:
            if assumed.model is None or of_script.items() <= given.items():
                raise
            given |= of_script


def unreported(found: Reading, changed: Mapping[str, Any], text: str, name: str) -> list[str]:
    """The keys that say something else in a changed file, and are not among its changes.

    Args:
        name: of the file, which tells a script from YAML.
    """
    before = flat(found.document.keys)
    after = flat(document_of(text, name).keys)
    differ = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    reported = flat(changed).keys()

    return sorted(
        key for key in differ if not any(f"{key}.".startswith(f"{name}.") for name in reported)
    )


def results_of(kept: Path | None) -> dict[str, dict[str, object]]:
    """The last row of each file, by its name below the directory."""
    if kept is None or not kept.exists():
        return {}
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    return {row["file"]: row for row in rows}


def main(arguments: list[str] | None = None) -> int:
    """Print the outcome of each file, and how many there are of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gpu-mem", type=float, help="GiB of the card to tune for")
    parser.add_argument("--devices", type=int, default=4, help="of files that say no number")
    parser.add_argument("--model", help="of files whose script has it")
    parser.add_argument("--seq-len", type=int, help="tokens, beside --model")
    parser.add_argument("--every", type=int, default=1, help="take every so-many-th file")
    parser.add_argument("--time-limit", type=float, help="seconds for each search")
    parser.add_argument("--output", type=Path, help="where tuned files are kept")
    parser.add_argument("--beside", type=Path, default=BESIDE, help="where other files are")
    parser.add_argument("--results", type=Path, help="JSON lines: what came of each file")
    args = parser.parse_args(arguments)

    tried_on = {"gpu_mem": args.gpu_mem, "devices": args.devices, "time_limit": args.time_limit}
    assumed = Assumed(args.devices, args.model, args.seq_len)
    counts: collections.Counter[str] = collections.Counter()
    known = results_of(args.results)
    for path in files_below(args.directory)[:: args.every]:
        name = str(path.relative_to(args.directory.absolute()))
        before = known.get(name, {})
        answered = before.get("outcome") in ("tuned", "refused")
        if answered or tried_on.items() <= before.items():
            counts[before["outcome"]] += 1
            continue

        try:
            kept = args.output and args.output.absolute() / name
            with contextlib.chdir(args.beside):
                kind, what = outcome(path, args.gpu_mem, assumed, kept, args.time_limit)
        except Exception as error:  # a fault, whatever it is
            kind, what = "fault", repr(error)
        counts[kind] += 1
        print(f"{kind:10} {name}: {what}", flush=True)

        if args.results:
            row = {"file": name, "outcome": kind, "said": what, **tried_on}
            with args.results.open("a") as results:
                results.write(json.dumps(row) + "\n")
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
