"""Exhaustive truth: every Config of a small space measured for real, several times over, kept as one JSON table.

`python -m benchmarks.record_table --model tiny-llama --space SPACE.yaml --out TABLE` probes as a
search does, once with every config before any is measured again, in another order each time, so that what disturbs the
machine for a while disturbs all of them. Written after every probe: the same command goes on where it was stopped.
With `--devices N` each probe is one of so many ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.environment import versions
from autofit.core.files import write_atomically
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.options import SearchOptions
from autofit.core.plain import from_plain
from autofit.core.workload import Workload
from autofit.estimate.rates import UNKNOWN, Rates, rates_for
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.hardware.budgets import budget_for
from autofit.models import resolve
from autofit.probe import Executor, GangExecutor, LocalExecutor, Plan, Request, place_ranks
from autofit.techniques import all_techniques
from autofit.tuning.space import legal_configs
from benchmarks.memory_models import MODELS, TIER_MODELS

# Shorter than a search's probes, since each is done several times, and long enough for a median that means something.
PLAN = Plan(min_steps=3, max_steps=20, max_seconds=1.0)
_RATES_SECONDS = 600.0  # at most
_TIMES = ("seconds", "build_seconds", "warmup_seconds", "compile_seconds", "steps", "composed")


@dataclass
class Row:
    """What was seen of one config.

    Attributes:
        probes: one element for each time it was measured, its times in seconds.
        predicted: bytes of tensors and seconds of a step, by the estimator of the day on which the
            table was recorded; None in older tables.
    """

    config: Config
    outcome: Outcome | None = None
    peak_bytes: int | None = None
    reason: str | None = None
    probes: list[dict[str, Any]] = field(default_factory=list)
    predicted: tuple[float, float] | None = None

    def add(self, seen: Measurement) -> None:
        """Note one more measurement; whoever fitted once and then did not is told by the latest outcome."""
        self.outcome, self.reason = seen.outcome, seen.reason
        if seen.peak_bytes:
            self.peak_bytes = max(
                self.peak_bytes or 0, seen.peak_bytes.reserved or seen.peak_bytes.allocated
            )
        times = {name: getattr(seen, name) for name in _TIMES}
        self.probes.append(
            {"step_seconds": seen.step_seconds and asdict(seen.step_seconds), **times}
        )

    @property
    def medians(self) -> list[float]:
        """The step time by each probe that timed any, in seconds."""
        return [each["step_seconds"]["median"] for each in self.probes if each["step_seconds"]]

    @property
    def step_seconds(self) -> float | None:
        """The median of the probes' medians."""
        return statistics.median(self.medians) if self.medians else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data: knobs that are off are left out, and times are rounded to four figures."""
        knobs = {}
        for technique in all_techniques():
            value = self.config.get(technique.name, technique.off)
            if value != technique.off:
                knobs[technique.name] = value

        return {
            **vars(self),
            "config": knobs,
            "outcome": self.outcome and self.outcome.value,
            "probes": _rounded(self.probes),
            "predicted": _rounded(self.predicted),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """A row of a table, which may be older than some knobs: those were off."""
        outcome = data["outcome"]
        config = Config(
            {each.name: data["config"].get(each.name, each.off) for each in all_techniques()}
        )
        predicted = data.get("predicted")
        return cls(
            **{
                **data,
                "config": config,
                "outcome": Outcome(outcome) if outcome else None,
                "predicted": tuple(predicted) if predicted else None,
            }
        )


@dataclass
class Table:
    """All configs of a space on one machine. `about` says what was measured, and where."""

    about: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Table:
        """The table of a file."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(data["about"], [Row.from_dict(each) for each in data["rows"]])

    def write(self, path: Path) -> None:
        """One row to a line, so that differences can be read."""
        rows = ",\n".join(json.dumps(row.to_dict()) for row in self.rows)
        write_atomically(
            path,
            f'{{"about": {json.dumps({**self.about, **self.noise()}, indent=1)},\n"rows": [\n{rows}\n]}}\n',
        )

    def noise(self) -> dict[str, Any]:
        """How far the probes of one config differ, as a share of their median: no claim is finer than that."""
        spreads = [
            (max(row.medians) - min(row.medians)) / median
            for row in self.rows
            if (median := row.step_seconds)
        ]
        if not spreads:
            return {}
        return {
            "noise": {
                "median": round(statistics.median(spreads), 4),
                "worst": round(max(spreads), 4),
            }
        }

    def predict(self, workload: Workload) -> list[tuple[float, float]]:
        """Bytes and seconds of each row, by the estimator as it stands and the rates recorded."""
        configs = [row.config for row in self.rows]
        rates = Rates(**self.about["rates"])
        rough = SpaceEstimator(workload, self.hardware, rates, configs).predict()
        return list(zip(rough.allocated.tolist(), rough.seconds.tolist(), strict=True))

    @property
    def hardware(self) -> Hardware:
        """The machine that it was measured on."""
        hardware: Hardware = from_plain(Hardware, self.about["hardware"])
        return hardware


def _rounded(data: Any) -> Any:
    """Plain data with its floats rounded to four figures: noise is larger."""
    if isinstance(data, Mapping):
        return {name: _rounded(value) for name, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_rounded(value) for value in data]
    if isinstance(data, float):
        return float(f"{data:.4g}")
    return data


def workload_named(name: str) -> Workload:
    """One of the memory benchmark's small models, or any that the command line takes."""
    case = {**MODELS, **TIER_MODELS}.get(name)
    return case.workload(name) if case else resolve(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is still missing in the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"{', '.join([*MODELS, *TIER_MODELS])}, or any that autofit search takes",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=int, default=1, help="that train each config together")
    parser.add_argument(
        "--mem",
        type=float,
        help="GiB; default: what is free, so that the replay can choose a budget",
    )
    parser.add_argument("--space", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, help="configs, drawn at random from a larger space")
    parser.add_argument(
        "--rates", action="store_true", help="measure the machine's rates and operators anew, too"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    memory = {"gpu_mem" if given.device == "cuda" else "mem": given.mem}
    options = SearchOptions(space=given.space, device=given.device, devices=given.devices, **memory)
    with contextlib.ExitStack() as stack:
        executor: Executor = stack.enter_context(LocalExecutor())
        workload = workload_named(given.model)
        hardware, traits = executor.inspect(workload, given.device, None)
        workload = dataclasses.replace(workload, traits=traits)
        if places := place_ranks(
            given.devices, hardware, lambda: executor.idle_cards_like(hardware, 0)
        ):
            logs = stack.enter_context(tempfile.TemporaryDirectory())
            executor = stack.enter_context(GangExecutor(places, Path(logs), options.probe_timeout))
        table = _begun(given, options, workload, hardware.of_several(given.devices), executor)
        record(
            table,
            given.out,
            executor,
            workload,
            budget_for(options, table.hardware),
            repeats=given.repeats,
        )
    print(summary(table))


def _begun(
    given: argparse.Namespace,
    options: SearchOptions,
    workload: Workload,
    hardware: Hardware,
    executor: Executor,
) -> Table:
    """The table as it stands, or a new one without measurements."""

    def rates() -> Any:
        asked = workload, hardware, configs
        if hardware.world == 1:
            return _rates(*asked)
        # on the cores of one rank
        return executor.run(_rates, *asked, log="rates.log", timeout=_RATES_SECONDS)

    about = {
        "model": given.model,
        **workload.summary(),
        "space": given.space,
        "hardware": asdict(hardware),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }
    configs = legal_configs(options, workload, hardware)
    if given.most and given.most < len(configs):
        configs = random.Random(0).sample(configs, given.most)
    if not given.out.exists():
        return Table({**about, "rates": rates()}, [Row(config) for config in configs])
    table = Table.read(given.out)
    same = ("model", "space", "effective_batch_size", "sequence_length")
    if any(table.about[name] != about[name] for name in same) or {
        row.config for row in table.rows
    } != set(configs):
        raise SystemExit(f"{given.out} holds another table: choose another --out.")
    if given.rates:
        table.about["rates"] = rates()
        table.write(given.out)
    return table


def _rates(workload: Workload, hardware: Hardware, configs: Sequence[Config]) -> dict[str, Any]:
    """What the machine reaches, and what the operators of these configs take on it, for replays on other machines."""
    estimator = SpaceEstimator(workload, hardware, rates_for(hardware) or UNKNOWN, configs)
    estimator.predict()
    return asdict(estimator.rates)


def record(
    table: Table,
    path: Path,
    executor: Executor,
    workload: Workload,
    budget: Budget,
    *,
    repeats: int,
) -> None:
    """Measure every config once, then each that fits again, until each was measured `repeats` times.

    At the end it is noted what is predicted of each.
    """
    for turn in range(repeats):
        waiting = [
            row
            for row in table.rows
            if len(row.probes) <= turn and row.outcome in (None, Outcome.FITS)
        ]
        random.Random(turn).shuffle(waiting)
        for number, row in enumerate(waiting):
            row.add(
                executor.measure(
                    workload, Request(row.config, table.hardware, budget, PLAN), number=number
                )
            )
            table.write(path)

    for row, predicted in zip(table.rows, table.predict(workload), strict=True):
        row.predicted = predicted
    table.write(path)


def summary(table: Table) -> str:
    """What is in the table, in a few lines."""
    outcomes = [row.outcome.value for row in table.rows if row.outcome]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes)))
    lines = [f"{table.about['model']}: {len(table.rows)} configs: {counts}"]
    times = sorted(row.step_seconds for row in table.rows if row.step_seconds)
    peaks = sorted(
        row.peak_bytes for row in table.rows if row.outcome is Outcome.FITS and row.peak_bytes
    )
    if times and peaks:
        lines.append(
            f"  steps of {times[0]:.3g} to {times[-1]:.3g} s, noise {table.noise()['noise']}"
        )
        lines.append(
            f"  peaks of {peaks[0] / GIB:.3f} to {peaks[-1] / GIB:.3f} GiB, {peaks[len(peaks) // 2] / GIB:.3f} median"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
