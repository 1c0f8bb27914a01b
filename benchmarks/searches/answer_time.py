"""Where the seconds of a search go: the README's demo, or any other search, by phase.

`python -m benchmarks.answer_time [--rounds 1] [--out FILE] [-- ARGUMENTS OF autofit search]`

A config counts as verified from the second of its final measurements on. What is told is the median of all rounds, each
of which begins with empty caches, as a first search does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT

from autofit.search.verification import ROUNDS

README = Path(__file__).parents[2] / "README.md"
PHASES = ("first probe", "last probe", "first verified", "last final", "end")
_PROBE, _FINAL = re.compile(r"probe \d+ of \d+: "), re.compile(r"verifying probe (\d+): ")


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, print a line for each phase, and write the figures where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("search", nargs="*", help="what to search for; default: the README's demo")
    given = parser.parse_args(arguments)
    asked = given.search or demo(README.read_text(encoding="utf-8"))
    rounds = [seconds_of(asked) for _ in range(given.rounds)]
    found = {
        phase: statistics.median(each[phase] for each in rounds)
        for phase in (*PHASES, "probes", "finals")
    }
    print(report(found))
    if given.out:
        figures = {"search": asked, "median": found, "rounds": rounds}
        given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def demo(readme: str) -> list[str]:
    """The arguments of the README's demo."""
    command = re.search(r"autofit search (--model tiny-llama [^\n]*)", readme)
    assert command, "the README has a demo"
    return command[1].split()


def seconds_of(arguments: Sequence[str]) -> dict[str, float]:
    """Seconds from the start until the end of each phase, and the numbers of probes and finals."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autofit", "search", *arguments, "--out", f"{folder}/run"]
        start = time.monotonic()
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        with subprocess.Popen(
            command, stdout=PIPE, stderr=STDOUT, text=True, env=environment
        ) as search:
            assert search.stdout
            lines = [(time.monotonic() - start, line) for line in search.stdout]
        ended = time.monotonic() - start
    if search.returncode:
        raise SystemExit("".join(line for _, line in lines))
    return phases(lines) | {"end": ended}


def phases(lines: Iterable[tuple[float, str]]) -> dict[str, float]:
    """When each phase ended, by the lines that a search tells of its probes."""
    probes, finals, verified = [], [], []
    rounds: Counter[str] = Counter()
    for seconds, line in lines:
        if final := _FINAL.match(line):
            finals.append(seconds)
            rounds[final[1]] += 1
            verified += [seconds] if rounds[final[1]] == ROUNDS else []
        elif _PROBE.match(line):
            probes.append(seconds)
    ends = {
        "first probe": probes[0],
        "last probe": probes[-1],
        "first verified": verified[0],
        "last final": finals[-1],
    }
    return ends | {"probes": len(probes), "finals": len(finals)}


def report(found: Mapping[str, float]) -> str:
    """A line for each phase."""
    before = (0.0, *(found[phase] for phase in PHASES))
    lines = [
        f"{phase:15s} after {found[phase]:6.1f} s, {found[phase] - ago:5.1f} s of them"
        for phase, ago in zip(PHASES, before, strict=False)
    ]
    return "\n".join([*lines, f"{found['probes']:.0f} probes, {found['finals']:.0f} finals"])


if __name__ == "__main__":
    main()
