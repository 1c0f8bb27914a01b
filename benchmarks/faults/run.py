"""Bad inputs for every command and every call, and faults in searches, trainings, ranks and files, drawn at random:
does autofit keep its promises? `python -m benchmarks.faults [--seeds N ...] [--inputs N] [--faults N] [--minutes N]`.

    One sentence and the right exit code; nothing lost; nothing that is read is run; nothing is left behind.

What was tried is kept a batch at a time, so a killed run goes on. What is found is tried again with a simpler fault,
and told with what repeats it: `--again NAME "FAULT"`.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.environment import versions
from benchmarks.gpu.store import Store

_STAGE = "faults"
_BATCHES = {"faults": 5, "inputs": 25}  # tries that are kept together


def main(arguments: list[str] | None = None) -> int:
    """Draw, try, and keep the table; 1 where anything was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--inputs", type=int, default=700, metavar="N", help="of each seed")
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="of each seed")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="in all")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="such as search, ranks, command, call"
    )
    parser.add_argument(
        "--again", nargs=2, metavar=("NAME", "FAULT"), help="one fault, as a finding tells it"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the table there, and go on with it"
    )
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # before torch is imported: only one without other threads may be forked
    )
    scratch = Path(tempfile.mkdtemp(prefix="autofit-faults-"))
    if (child := os.fork()) == 0:  # its mounts end with it
        code = 2
        try:
            code = _run(given, scratch)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.rmtree(scratch, ignore_errors=True)
    return code


def _run(given: argparse.Namespace, scratch: Path) -> int:
    from benchmarks.faults.faults import Fault
    from benchmarks.faults.inputs import NAMES, broken_by
    from benchmarks.faults.sandbox import Sandbox
    from benchmarks.faults.scenarios import SCENARIOS
    from benchmarks.faults.tries import Tries

    until = time.monotonic() + 60 * given.minutes
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    tries = Tries(Sandbox(scratch, (given.out or scratch).resolve()))
    chosen = (
        {given.again[0]} if given.again else set(given.only or [each.name for each in SCENARIOS])
    )
    scenarios = {each.name: each(tries) for each in SCENARIOS if each.name in chosen}
    if given.again:
        broken = scenarios[given.again[0]].broken_by(Fault.read(given.again[1]))
        print(*broken or ["nothing"], sep="\n")
        return bool(broken)
    store = Store((given.out or scratch) / "faults.jsonl")
    for part, known, wanted in (
        ("faults", [*scenarios], given.faults),
        ("inputs", NAMES, given.inputs),
    ):
        names = [name for name in known if not given.only or set(given.only) & set(name.split())]
        end = (until + time.monotonic()) / 2 if part == "faults" and given.inputs else until
        for batch, name, seed in _batches(names, given.seeds, wanted, _BATCHES[part]):
            key, start = f"{seed} {name} {batch}", time.monotonic()
            rarely = batch % scenarios[name].every if part == "faults" else 0
            if store.get(_STAGE, key) or start > end or rarely:
                continue
            if part == "faults":
                tried, found = _faults(scenarios[name], key)
            else:
                tried, found = broken_by(tries, key, name, _BATCHES[part])
            seconds = round(time.monotonic() - start, 1)
            row = {
                "part": part,
                "name": name,
                "seed": seed,
                "tried": tried,
                "found": found,
                "seconds": seconds,
            }
            store.add(_STAGE, key, row)
            print(f"{key}: {tried} tried in {seconds:.0f} s", flush=True)
            for what, how in found.items():
                print(f"  {what}\n    {how}", flush=True)
    rows = list(store.rows(_STAGE).values())
    if given.out:
        (given.out / "faults.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))
    return int(any(row["found"] for row in rows))


def _batches(
    names: list[str], seeds: list[int], wanted: int, size: int
) -> list[tuple[int, str, int]]:
    """Batches of all names and seeds by turns, so that a run that is cut short has tried of everything."""
    number = -(-wanted // (size * max(1, len(names))))
    return [(batch, name, seed) for batch in range(number) for name in names for seed in seeds]


def _faults(scenario: Any, key: str) -> tuple[int, dict[str, str]]:
    """How many of a batch of faults struck, and what they break, each with the simplest fault found that does so."""
    rng, found, before = random.Random(key), dict[str, str](), scenario.tried
    for _ in range(_BATCHES["faults"]):
        fault = scenario.draw(rng)
        if broken := scenario.broken_by(fault):
            sooner = [
                replace(fault, delay=0.0, event=int(fault.event * share))
                for share in (1.0, 0.3, 0.7)
            ]
            for each in [each for each in sooner if each != fault]:
                if again := scenario.broken_by(each):
                    fault, broken = each, again
                    break
            found["; ".join(broken)[:1000]] = str(fault)
    return scenario.tried - before, found


def table(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown: what was tried, by name, over how many seeds, and what was found."""
    lines = ["# Faults", "", "What `python -m benchmarks.faults` tried and found.", ""]
    lines += ["| what | seeds | tried | found | minutes |", "|---|---|---|---|---|"]
    for part in _BATCHES:
        own = [row for row in rows if row["part"] == part]
        for name in [*dict.fromkeys(row["name"] for row in own), f"**all {part}**"]:
            those = [row for row in own if name in (row["name"], f"**all {part}**")]
            seeds = ", ".join(map(str, sorted({row["seed"] for row in those})))
            tried, found = (
                sum(row["tried"] for row in those),
                sum(len(row["found"]) for row in those),
            )
            minutes = sum(row["seconds"] for row in those) / 60
            lines.append(f"| {name} | {seeds} | {tried:,} | {found} | {minutes:.1f} |")
    found = [
        f"- {row['name']}, {how}: {what}" for row in rows for what, how in row["found"].items()
    ]
    told = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    return "\n".join([*lines, "", *(found or ["Nothing was found."]), "", f"With {told}.", ""])
