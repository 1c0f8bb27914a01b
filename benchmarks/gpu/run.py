"""The command: stages one after the other within the time, and the results after every one of them.

A stage gets a share of the time that is left and is stopped when that is over; a stage that fails stops no other. What
a former call has stored is not measured again. SIGTERM ends the call as the end of its time does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from autofit.core.environment import versions
from autofit.core.errors import AutofitError, ProbeError
from autofit.core.files import write_atomically
from autofit.hardware.device import detect
from benchmarks.gpu import levers, listed, measured, plan, replay
from benchmarks.gpu.bench import Bench, LeftOutError, TimeUp, sentence
from benchmarks.gpu.cards import described, queried, slug, stores, take
from benchmarks.gpu.correct import CORRECT
from benchmarks.gpu.levers import LEVERS
from benchmarks.gpu.listed import LISTED
from benchmarks.gpu.loop import LOOP
from benchmarks.gpu.markdown import document
from benchmarks.gpu.memory import MEMORY
from benchmarks.gpu.peers import PEERS_STAGE
from benchmarks.gpu.ranks import RANKS
from benchmarks.gpu.search import SEARCH
from benchmarks.gpu.speed import SPEED
from benchmarks.gpu.stage import Stage, Summary
from benchmarks.gpu.store import Store
from benchmarks.gpu.wanted import verdicts

RESULTS = Path(__file__).resolve().parents[1] / "results"
# In the order of what nothing but a card can tell: how good the search is comes first.
STAGES = {
    each.name: each
    for each in (SEARCH, LISTED, LOOP, PEERS_STAGE, MEMORY, SPEED, CORRECT, RANKS, LEVERS)
}
DONE, FAILED, LEFT_OUT, TIME_UP, NO_TIME, STOPPED = (
    "done",
    "failed",
    "left out",
    "time was up",
    "no time left",
    "stopped",
)
_ROWS = "stage"  # of the store: what became of each stage
_TAKEN = {"outcome": "taken from a list", "reason": None, "seconds": 0.0}
_SMOKE_LEAST = 1.0
_AGAIN_SECONDS = 5.0  # an alarm that went off where nobody could hear it goes off again
_TERMINATED = 143
_WRITE_SECONDS = 15.0  # between two times that the results are written while a stage runs


class Stopped(BaseException):
    """Somebody wants this process to end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages asked for; 1 when one failed, 4 where nothing can be measured."""
    given = _parser().parse_args(arguments)
    results = given.out / "gpu"
    if given.plan is not None:
        print(plan.told(given.plan))
        return 0
    if given.replay:
        told = replay.told(_stored(results, given.card), given.seeds)
        write_atomically(results / "replay.txt", told + "\n")
        print(told)
        return 0
    if given.take or given.tell or given.estimate_again:
        return _told_again(given, results)

    name = given.card or queried("name")
    directory = given.out / "gpu-smoke" if given.smoke else results / slug(name or "")
    return _measure(given, directory)


def _told_again(given: argparse.Namespace, results: Path) -> int:
    """Make results of what is stored: taken from elsewhere, with estimates made anew, or as it is."""
    directories = [take(given.take, results)] if given.take else _stored(results, given.card)
    for directory in directories:
        store = Store(directory / "items.jsonl")
        if given.estimate_again:
            listed.estimate_again(store)
            bench = Bench(store, directory / "work", smoke=False)
            try:
                with _within(bench, given.minutes * 60):
                    measured.estimate_again(bench)
            except TimeUp:
                print("the time was up before all estimates were made anew", file=sys.stderr)
            finally:
                bench.drop_executor()
                store.reload()
        if store.get("about"):
            print(write_results(store))
    return 0


def _stored(results: Path, card: str | None) -> list[Path]:
    """The directories of one card, or of all."""
    return [path for path in stores(results) if card is None or path.name == slug(card)]


def _measure(given: argparse.Namespace, directory: Path) -> int:
    store = Store(directory / "items.jsonl")
    bench = Bench(store, directory / "work", given.smoke)
    names = given.stage or [
        name for name in STAGES if (store.get(_ROWS, name) or {}).get("outcome") != DONE
    ]
    if given.fresh or given.retry:
        names = given.stage or list(STAGES)
        _forget(bench, names, only_failed=not given.fresh)
    measured.forget_stale(store)
    store.added = _NowAndThen(store)
    before = signal.signal(signal.SIGTERM, _stop)
    deadline = time.monotonic() + given.minutes * 60
    try:
        return _work(bench, names, deadline)
    except Stopped:
        return _TERMINATED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending
        bench.drop_executor()
        store.reload()
        if store.get("about"):
            print(write_results(store))
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all stages together (9)")
    parser.add_argument(
        "--stage", nargs="+", choices=list(STAGES), metavar="NAME", help=f"of {', '.join(STAGES)}"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="directory for results, logs and run directories"
    )
    parser.add_argument("--smoke", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument(
        "--fresh", action="store_true", help="forget what is stored of these stages"
    )
    parser.add_argument("--retry", action="store_true", help="forget what failed in these stages")
    parser.add_argument(
        "--estimate-again",
        action="store_true",
        help="make the stored estimates anew; needs no card, measures nothing",
    )
    parser.add_argument(
        "--tell", action="store_true", help="only write the results of what is stored"
    )
    parser.add_argument(
        "--take", type=Path, metavar="FILE", help="add the items.jsonl that a lent machine left"
    )
    parser.add_argument(
        "--card", help="by its name: whose results (default: the card that is here, or all)"
    )
    parser.add_argument(
        "--plan", type=float, metavar="MINUTES", help="only tell what would be done in so much time"
    )
    parser.add_argument(
        "--replay", action="store_true", help="only replay the search against what cards have shown"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of a replay (3)")
    return parser


class _NowAndThen:
    """Writes the results while figures come, for whoever is killed without a word."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._written = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._written > _WRITE_SECONDS and self._store.get("about"):
            self._written = time.monotonic()
            write_results(self._store)


def _stop(*_: object) -> None:
    raise Stopped


def _forget(bench: Bench, names: Sequence[str], *, only_failed: bool) -> None:
    """Drop rows of stages; those of memory and levers stand together."""
    of_stages = {measured.STAGE if name in ("memory", "levers") else name for name in names}
    bench.store.forget(
        of_stages, (lambda row: "failed" in row) if only_failed else (lambda row: True)
    )
    bench.store.forget([_ROWS], lambda row: row["stage"] in names)
    if SEARCH.name in names and not only_failed:
        for run in bench.work.glob("search-*"):
            shutil.rmtree(run)


def _work(bench: Bench, names: Sequence[str], deadline: float) -> int:
    try:
        with _within(bench, deadline - time.monotonic()):
            if names:
                _describe(bench)
    except (AutofitError, TimeUp) as error:
        print(f"nothing can be measured here: {sentence(error)}", file=sys.stderr)
        return ProbeError.exit_code
    outcomes = []
    for place in range(len(names)):
        later = [STAGES[each] for each in names[place:]]
        outcomes.append(_stage(later, bench, deadline))
        write_results(bench.store)
    return int(FAILED in outcomes)


def _describe(bench: Bench) -> None:
    """Store what figures must have in common, or hold it against what is stored."""
    if not bench.smoke and not torch.cuda.is_available():
        detect(bench.device)  # says so at once, where a zygote would import for seconds first
    hardware = bench.executor.detect(bench.device)
    known = bench.store.get("about")
    if known is None:
        bench.store.add("about", "", described(hardware))
        return
    here = {"device": hardware.name, "torch": versions()["torch"]}
    there = {"device": known["hardware"]["name"], "torch": known["versions"]["torch"]}
    if here != there:
        differing = ", ".join(
            f"{name} {there[name]}, not {here[name]}" for name in here if here[name] != there[name]
        )
        raise ProbeError(
            f"{bench.store.path} holds figures of another machine: {differing}.",
            "Choose another --out.",
        )


def _stage(later: Sequence[Stage], bench: Bench, deadline: float) -> str:
    """Run the first of some stages within its share of the time that is left; store and return what became of it."""
    stage = later[0]
    seconds = seconds_for(
        later, deadline - time.monotonic(), least=_SMOKE_LEAST if bench.smoke else None
    )
    start = time.monotonic()
    former = bench.store.get(_ROWS, stage.name)
    if not seconds:
        row = {"stage": stage.name, "outcome": NO_TIME, "reason": None, "seconds": 0.0}
        bench.store.add(_ROWS, stage.name, former or row)
        return NO_TIME
    print(f"{stage.name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
    outcome, reason = STOPPED, None
    try:
        outcome, reason = _ran(stage, bench, seconds)
    finally:
        row = {"stage": stage.name, "outcome": outcome, "reason": reason}
        spent = (former or {}).get("seconds", 0.0) + time.monotonic() - start
        bench.store.add(_ROWS, stage.name, {**row, "seconds": round(spent, 1)})
    return outcome


def seconds_for(later: Sequence[Stage], left: float, *, least: float | None = None) -> float:
    """Of the time that is left, the share of the first of some stages; at least what it needs, or 0."""
    stage = later[0]
    needed = stage.least_seconds if least is None else least
    share = left * stage.share if len(later) > 1 else left
    return min(left, max(share, needed)) if left >= needed else 0.0


def _ran(stage: Stage, bench: Bench, seconds: float) -> tuple[str, str | None]:
    try:
        with _within(bench, seconds):
            stage.run(bench)
    except TimeUp:
        bench.drop_executor()
        return TIME_UP, None
    except LeftOutError as error:
        return LEFT_OUT, str(error)
    except Exception as error:  # whatever it is, the other stages go on
        traceback.print_exc()
        bench.drop_executor()
        return FAILED, "".join(traceback.format_exception(error)).strip()[-1000:]
    finally:
        bench.store.reload()
    return DONE, None


@contextlib.contextmanager
def _within(bench: Bench, seconds: float) -> Iterator[None]:
    """Raise TimeUp inside when so many seconds are over."""

    def over(*_: object) -> None:
        raise TimeUp

    bench.deadline = time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _summary_of(stage: Stage, store: Store) -> Summary:
    """What a stage tells; a mistake in telling must not end what measures."""
    try:
        return stage.summarize(store)
    except Exception as error:
        traceback.print_exc()
        return Summary(notes=[f"what is stored cannot be summarized: {sentence(error)}"])


def write_results(store: Store) -> str:
    """results.json, levers.json and results.md, all from what is stored; returns the Markdown."""
    about = store.get("about")
    assert about, "the runner describes the machine first"
    directory = store.path.parent
    rows = store.rows(_ROWS)
    summaries = {name: _summary_of(each, store) for name, each in STAGES.items()}
    figures = {name: dict(each.figures) for name, each in summaries.items()}
    found = verdicts(figures)
    shown = [name for name in STAGES if name in rows or summaries[name].tables]
    stages = [(rows.get(name, {**_TAKEN, "stage": name}), summaries[name]) for name in shown]
    results: dict[str, Any] = {
        "about": about,
        "numbers": [vars(each) for each in found],
        "stages": [{**row, "figures": figures[row["stage"]]} for row, _ in stages],
    }
    write_atomically(directory / "results.json", json.dumps(results, indent=1) + "\n")
    write_atomically(directory / "levers.json", json.dumps(levers.rows_of(store), indent=1) + "\n")
    text = document(about, found, stages)
    write_atomically(directory / "results.md", text)
    return text
