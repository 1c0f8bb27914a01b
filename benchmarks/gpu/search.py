"""Stage search: a whole search of an 8B model under a 24 GiB cap, as a user runs it, and what it may have missed.

Afterwards 10 configs predicted to be fastest of those it did not measure, and 10 random ones, are measured within the
same budget, in turn, and the best again beside them. None of them is a near-twin of another or of one that the search
measured: rank, optimizer and 16-bit format change little, and are told apart by prediction. Then the same search under
other caps, as time allows.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from autofit.core.budget import Budget, gib_to_bytes
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Outcome
from autofit.core.options import SearchOptions
from autofit.core.result import TIERS
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.probe import Plan
from autofit.report.formatting import describe
from autofit.tuning.space import legal_configs
from benchmarks.gpu.bench import Bench, Ended, TimeUp, python
from benchmarks.gpu.cases import TINY
from benchmarks.gpu.measured import ESTIMATE_SECONDS, UNLIMITED, measured
from benchmarks.gpu.stage import Stage, Summary, Table
from benchmarks.gpu.store import Row, Store

STAGE = "search"
BEST, CANDIDATES = "the best again", "candidates"
_HEAD = (
    "budget",
    "seconds",
    "probes",
    "out of memory",
    "stopped by",
    "best: tokens/s",
    *TIERS,
    "best config",
)
_PLAN = Plan(min_steps=3, max_steps=10, max_seconds=4.0)
_LEAST_SEARCH, _LEAST_PROBE = 200.0, 14.0
_LIMIT, _SHARE = 300.0, 0.7  # what a search may take: seconds, and of the time that is left
# knobs in which near-twins differ
_OF_TWINS = ("precision", "optimizer", "lora_rank", "lora_alpha")
_LOW = ("bf16", "bf16-mixed", "fp16-mixed")


@dataclass(frozen=True)
class Search:
    """What is searched. `afterwards`: so many of the predicted, and so many random ones; `settings`: knobs that are
    held to some of their values."""

    model: str
    space: str
    budgets: Sequence[float]
    effective_batch_size: int
    afterwards: int
    trials: int | None = None
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def options(self, bench: Bench, gib: float) -> list[str]:
        """Of the command line."""
        memory = (
            ["--device", "cpu", "--mem", f"{gib:g}"] if bench.smoke else ["--gpu-mem", f"{gib:g}"]
        )
        sizes = [
            "--seq-len",
            str(bench.grid.sequence_length),
            "--effective-batch",
            str(self.effective_batch_size),
        ]
        trials = ["--trials", str(self.trials)] if self.trials else []
        settings = [f"--set={knob}={','.join(values)}" for knob, values in self.settings.items()]
        return ["--model", self.model, "--space", self.space, *memory, *sizes, *trials, *settings]


# Paged optimizers oversubscribe managed memory, which can hang a card; max-autotune takes minutes for a config.
_SETTINGS = {"optimizer": ("adamw", "adamw-foreach", "adamw-8bit"), "compile": ("none", "default")}
CARD = Search("llama-3.1-8b", "everything", (24, 80, 16, 48), 16, afterwards=10, settings=_SETTINGS)
SMOKE = Search(str(TINY), "benchmarks/searches/spaces/smoke.yaml", (1,), 4, afterwards=1, trials=1)
# What train.py is written for: where the best streams weights, there is none.
_RESIDENT = {"quantization": ("nf4",), "lora_rank": ("16",), "parameter_offload": ("none",)}
SMALL = Search(
    "qwen2.5-1.5b", "everything", (24,), 16, afterwards=0, settings={**_SETTINGS, **_RESIDENT}
)


def searched(bench: Bench) -> Search:
    """What is searched on this machine."""
    return SMOKE if bench.smoke else CARD


def key_of(gib: float) -> str:
    """The row of the search within a budget."""
    return f"{gib:g} GiB"


def budget_of(gib: float) -> Budget:
    """What probes beside a search are held to."""
    return Budget(gib_to_bytes(gib), UNLIMITED)


def run(bench: Bench) -> None:
    """Search within the first budget, measure what may have been missed, then search within the others."""
    what = searched(bench)
    first, *others = what.budgets
    _search(bench, what, first)
    _afterwards(bench, what, first)
    for gib in others:
        _search(bench, what, gib)


def _search(bench: Bench, what: Search, gib: float) -> None:
    if bench.store.get(STAGE, key_of(gib)) is not None:
        return
    bench.need(1.0 if bench.smoke else _LEAST_SEARCH)
    out = bench.work / f"search-{gib:g}"
    resume = ["--resume"] if (out / "journal.log").exists() else []
    limit = ["--time-limit", f"{max(1, int(min(_LIMIT, bench.left * _SHARE)))}s"]
    # if so, its seconds are those of the last part alone
    about = {"gib": gib, "resumed": bool(resume)}
    bench.store.add(
        STAGE, key_of(gib), {**about, **_answer(bench, what, gib, out, [*limit, *resume])}
    )


def quick(bench: Bench, what: Search) -> Row:
    """What a quick search finds within its first budget."""
    out = bench.work / "search-quick"
    shutil.rmtree(out, ignore_errors=True)  # of a call before
    return _answer(bench, what, what.budgets[0], out, ["--fast"])


def _answer(bench: Bench, what: Search, gib: float, out: Path, options: Sequence[str]) -> Row:
    command = [
        "-m",
        "autofit",
        "search",
        *what.options(bench, gib),
        "--out",
        str(out),
        "--json",
        "--quiet",
    ]
    ended = python([*command, "--no-store", *options], bench.left)
    if ended is None:
        raise TimeUp
    return _found(out, ended)


def _found(out: Path, ended: Ended) -> Row:
    """What a search found as a row: its answer, and the files that the stage loop runs."""
    try:
        answer: dict[str, Any] = json.loads(ended.stdout)
    except ValueError:
        answer = {}
    if ended.code or not answer.get("best"):
        return {"failed": f"exit code {ended.code}: {answer.get('error') or ended.last_words}"}
    return {
        "answer": {
            name: answer[name]
            for name in ("best", "tiers", "trials", "skipped", "stopped_by", "space_size")
        },
        "search_seconds": answer["search_seconds"],
        "notes": answer["notes"],
        "files": {
            name: (out / name).read_text()
            for name in ("result.yaml", "train.py")
            if (out / name).exists()
        },
    }


def _afterwards(bench: Bench, what: Search, gib: float) -> None:
    """The best again, then one predicted and one random config in turn."""
    found = bench.store.get(STAGE, key_of(gib))
    if found is None or "failed" in found:
        return
    workload, budget = bench.workload(what.model, what.effective_batch_size), budget_of(gib)
    known = bench.store.get(STAGE, CANDIDATES)
    if known is None:
        seen = [trial["config"] for trial in found["answer"]["trials"]]
        arguments = (bench.hardware, what, gib, seen, bench.measuring)
        known = bench.executor.run(
            candidates,
            workload,
            *arguments,
            log="estimate.log",
            timeout=bench.at_most(2 * ESTIMATE_SECONDS),
        )
        bench.store.add(STAGE, CANDIDATES, known)
    predicted = [(f"predicted {n}", config) for n, config in enumerate(known["predicted"], 1)]
    drawn = [(f"random {n}", config) for n, config in enumerate(known["random"], 1)]
    plan = replace(
        _PLAN, best_seconds=found["answer"]["best"]["measured"]["step_seconds"]["median"]
    )
    turns = chain.from_iterable(zip_longest(predicted, drawn))
    for key, config in [(BEST, found["answer"]["best"]["config"]), *filter(None, turns)]:
        if bench.store.get(STAGE, key) is None:
            bench.need(1.0 if bench.smoke else _LEAST_PROBE)
            bench.store.add(STAGE, key, measured(bench, workload, Config(config), budget, plan))


def candidates(
    workload: Workload,
    hardware: Hardware,
    what: Search,
    gib: float,
    seen: Sequence[dict[str, Any]],
    measuring: float,
) -> Row:
    """Of the configs that were not measured and are predicted to fit: the fastest, and random others; no near-twins."""
    memory = {"mem": gib} if hardware.device == "cpu" else {"gpu_mem": gib}
    options = SearchOptions(
        space=what.space, set=dict(what.settings), device=hardware.device, **memory
    )
    configs = legal_configs(options, workload, hardware)
    # As the search had it, which has stored it.
    nbytes, seconds = predict_all(workload, hardware, configs, measuring=measuring, processes=None)
    cap = budget_of(gib).cap_bytes(hardware.device, hardware.context_bytes)

    known = {_without_twins(config) for config in seen}
    fastest: dict[Any, dict[str, Any]] = {}  # of near-twins
    for _, place in sorted(
        (seconds[place], place) for place in range(len(configs)) if nbytes[place] <= cap
    ):
        fastest.setdefault(_without_twins(configs[place]), dict(configs[place]))
    ranked = [config for likeness, config in fastest.items() if likeness not in known]

    count = what.afterwards
    rest = ranked[count:]
    return {
        "predicted": ranked[:count],
        "random": random.Random(0).sample(rest, min(count, len(rest))),
    }


def _without_twins(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a config has in common with its near-twins."""
    precision = "low" if config["precision"] in _LOW else config["precision"]
    others = sorted((knob, value) for knob, value in config.items() if knob not in _OF_TWINS)
    return precision, bool(config.get("lora_rank")), *others


def regret(store: Store) -> float | None:
    """By what share the best is slower than the fastest of all that was measured beside it; None: nothing was."""
    rows = {
        key: row["measurement"] for key, row in store.rows(STAGE).items() if "measurement" in row
    }
    speeds = {
        key: row["samples_per_second"]
        for key, row in rows.items()
        if row["outcome"] == Outcome.FITS.value
    }
    best = speeds.pop(BEST, None)
    return max(0.0, 1 - best / max(speeds.values())) if best and speeds else None


def summarize(store: Store) -> Summary:
    """The searches, and what was measured after the first."""
    rows = store.rows(STAGE)
    searches = {key: row for key, row in rows.items() if "gib" in row}
    found = {key: row for key, row in searches.items() if "answer" in row}
    notes = [
        f"the search within {key}: {row['failed']}"
        for key, row in searches.items()
        if "failed" in row
    ]
    for key, row in found.items():
        if row["resumed"]:
            notes.append(f"the search within {key} was resumed: its time is that of its last part.")
    tables = (
        [Table("Search", _HEAD, [_line(key, row) for key, row in found.items()])] if found else []
    )
    figures: dict[str, Any] = {}
    first = next(iter(searches.values()), {})
    if "answer" in first:
        trials, best = first["answer"]["trials"], first["answer"]["best"]
        figures = {"search seconds": first["search_seconds"], "probes": len(trials)}
        figures |= {
            "out of memory": _out_of_memory(first),
            "tokens/s": best["measured"]["tokens_per_second"],
        }
    after = {key: row for key, row in rows.items() if "measurement" in row}
    if after:
        figures |= {"measured afterwards": len(after) - (BEST in after), "regret": regret(store)}
        head = ("config", "outcome", "tokens/s", "knobs")
        tables.append(
            Table("Measured after the search", head, [_after(*each) for each in after.items()])
        )
    return Summary(figures, tables, notes)


def _out_of_memory(row: Row) -> int:
    return sum(trial["outcome"] == Outcome.OUT_OF_MEMORY.value for trial in row["answer"]["trials"])


def _line(key: str, row: Row) -> list[str | None]:
    answer = row["answer"]
    answers = [answer["best"], *(answer["tiers"].get(name) for name in TIERS)]
    speeds = [each and f"{each['measured']['tokens_per_second']:,.0f}" for each in answers]
    about = [
        f"{row['search_seconds']:.0f}",
        str(len(answer["trials"])),
        str(_out_of_memory(row)),
        answer["stopped_by"],
    ]
    return [key, *about, *speeds, describe(answer["best"]["config"])]


def _after(key: str, row: Row) -> list[str | None]:
    measurement = row["measurement"]
    speed = measurement["tokens_per_second"]
    return [
        key,
        measurement["outcome"],
        None if speed is None else f"{speed:,.0f}",
        describe(measurement["config"]),
    ]


SEARCH = Stage(STAGE, share=0.5, least_seconds=_LEAST_SEARCH, run=run, summarize=summarize)
