"""Published files changed to configs drawn at random, for the tools' own parsers to read: `python -m
benchmarks.exports.corpus_drawn DIRECTORY --output OUT --draws 8`.

Of each file below the directory that `autofit tune` reads, so many files are written: each knob that
is open takes any of the values that a search may give it, and what is written is what tuning to that
config would write. Predicting nothing, this sees many more of the files that tuning may write than
`corpus` does. OUT/before has the originals and OUT/after the drawn ones, by the same names, as
`corpus_parsers` takes them.

A file that changes in other keys than the reported ones is a fault, and makes the exit code 1.
"""

import argparse
import collections
import contextlib
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from autofit import techniques
from autofit.api.tool_file import Reading
from autofit.api.tune import as_tool_reads, searched_workload, settings_of
from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.export.importers.importer import changes
from autofit.hardware.catalogue import card, hardware_of
from autofit.tuning.space import space_for
from benchmarks.exports.corpus import BESIDE, Assumed, files_below, read_assuming, unreported

TRIES = 200  # draws, of which one may be a legal config
CARD = "h100"


def drawn(found: Reading, generator: random.Random) -> tuple[str, list[str]] | None:
    """A file changed to a config drawn at random, and the keys that it does not report; None where
    no draw is one that a search may choose.
    """
    workload = searched_workload(found)
    hardware = hardware_of(card(CARD)).of_several(found.there.devices, found.there.nodes)
    importer = found.importer
    keys = found.document.keys
    settings = settings_of(found, importer.keeps(keys), ())
    options = search_options(space="everything", set=settings)
    knobs = space_for(options, workload, hardware).knobs

    for _ in range(TRIES):
        values = {name: generator.choice(choices) for name, choices in knobs.items()}
        config = _legal(values, workload, hardware)
        if config is None:
            continue

        after, is_open = as_tool_reads(found, config, settings)
        changed = changes(importer, keys, found.before, after, is_open)
        text = found.document.changed(changed)

        return text, unreported(found, changed, text, str(found.path))

    return None


def _legal(values: Mapping[str, Value], workload: Workload, hardware: Hardware) -> Config | None:
    """The config of such values, where a search may choose it."""
    with contextlib.suppress(InputError):  # knobs that contradict each other
        config = techniques.canonicalize(values, workload, hardware)
        if techniques.refuse(config, workload, hardware) is None:
            return config

    return None


def main(arguments: list[str] | None = None) -> int:
    """Write the files; print those without any, faults, and counts at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="where files are written")
    parser.add_argument("--draws", type=int, default=8, help="of each file")
    parser.add_argument("--devices", type=int, default=4, help="of files that say no number")
    parser.add_argument("--model", help="of files whose script has it")
    parser.add_argument("--seq-len", type=int, help="tokens, beside --model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=Path, default=BESIDE, help="where other files are")
    args = parser.parse_args(arguments)

    before = args.output.absolute() / "before"
    after = args.output.absolute() / "after"
    for folder in (before, after):
        folder.mkdir(parents=True, exist_ok=True)

    assumed = Assumed(args.devices, args.model, args.seq_len)
    counts: collections.Counter[str] = collections.Counter()
    for path in files_below(args.directory):
        try:
            with contextlib.chdir(args.beside):
                found, _ = read_assuming(path, assumed)
        except InputError:
            counts["refused"] += 1
            continue

        written = set()
        for number in range(args.draws):
            generator = random.Random(f"{args.seed} {path.name} {number}")
            with contextlib.chdir(args.beside):
                made = drawn(found, generator)
            if made is None:
                break

            text, more = made
            if more:
                counts["fault"] += 1
                print(f"fault      {path.name}: {', '.join(more)} changed as well", flush=True)
            if text in written:
                continue

            written.add(text)
            name = f"{path.stem}--{number}{path.suffix}"
            (before / name).write_text(path.read_text())
            (after / name).write_text(text)

        counts["files" if written else "without a legal config"] += 1
        counts["written"] += len(written)
        if not written:
            print(f"none       {path.name}", flush=True)

    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
