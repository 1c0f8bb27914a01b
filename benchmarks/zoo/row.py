"""What is tried with one family: it is looked at, predicted, probed in three settings and searched with two trials.

Everything goes through the functions that the command line calls; predictions and probes run in children of one zygote,
as those of a search do. Whatever one of them ends with is a result of the benchmark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from autofit.api.search import search
from autofit.core.budget import Budget
from autofit.core.errors import AutofitError, printable
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.peak import peak_of
from autofit.estimate.trace import trace
from autofit.models import resolve
from autofit.probe import Executor, Plan, Request
from autofit.probe.measure import measure
from autofit.techniques import canonicalize, refuse

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_rank": 8, "activation_checkpointing": "full"},
    "qlora": {"lora_rank": 8, "activation_checkpointing": "full", "quantization": "nf4"},
}
# Tried alone where a setting that holds it does not run, so that each lever has an answer of its own.
LEVERS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 8},
    "checkpointing": {"activation_checkpointing": "full"},
    "nf4": {"lora_rank": 8, "quantization": "nf4"},
}
# A search of two trials in a space of two configs: what it finds is not asked, only that it ends well.
SPACE = Path(__file__).with_name("space.yaml")
TRIALS = 2
MEMORY_GIB = 4.0
_COMMAND_SECONDS = 180.0
_BRIEF = Plan(min_steps=1, max_steps=1)


@dataclass
class Answer:
    """How one thing went: it worked, was refused in a sentence, or failed with whatever came."""

    outcome: str  # "works", "refused" or "fails"
    message: str = ""


@dataclass
class Figures:
    """Bytes of one setting; None where there are none, which its answers tell why."""

    predicted: int | None
    probed: int | None
    probe: Answer
    prediction: Answer


@dataclass
class Row:
    """All that was seen of one family."""

    parameters: int = 0
    looked_at: Answer = field(default_factory=lambda: Answer("works"))
    search: Answer | None = None
    command: Answer | None = (
        None  # the same search by the real command line, of one family of each task
    )
    settings: dict[str, Figures] = field(default_factory=dict)
    levers: dict[str, Answer] = field(default_factory=dict)
    seconds: float = 0.0


def tried(model: str, executor: Executor, *, options: Mapping[str, Any]) -> Row:
    """The row of what `--model` names, without searches."""
    start, row = time.monotonic(), Row()
    workload: list[tuple[Workload, Hardware]] = []
    row.looked_at = answer_of(lambda: workload.append(_looked_at(model, executor, options)))
    if workload:
        row.parameters = workload[0][0].traits.parameters  # type: ignore[union-attr]
        _settings(row, *workload[0], executor)
    row.seconds = round(time.monotonic() - start, 2)
    return row


def searched(
    model: str, executor: Executor, *, options: Mapping[str, Any], command: bool
) -> dict[str, Any]:
    """How a search of what `--model` names goes; `command`: by the real command line, too."""
    search = asdict(answer_of(lambda: _searched(model, executor, options)))
    return {
        "search": search,
        "command": asdict(answer_of(lambda: _commanded(model, options))) if command else None,
    }


def answer_of(action: Callable[[], Any]) -> Answer:
    """How a call went."""
    try:
        action()
    except AutofitError as error:
        return Answer("refused", printable(str(error), 1000))
    except Exception:
        return Answer("fails", traceback.format_exc()[-1500:])
    return Answer("works")


def _looked_at(
    model: str, executor: Executor, options: Mapping[str, Any]
) -> tuple[Workload, Hardware]:
    workload = resolve(model, **options)
    hardware, traits = executor.inspect(workload, "cpu", int(MEMORY_GIB * GIB))
    return dataclasses.replace(workload, traits=traits), hardware


def _settings(row: Row, workload: Workload, hardware: Hardware, executor: Executor) -> None:
    settings = {name: _possible(knobs, workload, hardware) for name, knobs in SETTINGS.items()}

    def figures() -> None:
        found = executor.run(
            seen, workload, hardware, settings, log="seen.log", timeout=120, task="predicting"
        )
        row.settings.update(found)

    died = answer_of(figures)
    for name, knobs in settings.items():
        if name not in row.settings:  # each of the probes in a process of its own, as in a search
            row.settings[name] = Figures(
                None, *_probed(workload, hardware, knobs, executor.measure), died
            )
    for lever, knobs in LEVERS.items():
        held = (name for name in settings if knobs.items() <= settings[name].items())
        if any(row.settings[name].probe.outcome == "works" for name in held):
            row.levers[lever] = Answer("works")
        else:
            row.levers[lever] = _probed(workload, hardware, knobs, executor.measure)[1]


def _possible(knobs: Mapping[str, Any], workload: Workload, hardware: Hardware) -> dict[str, Any]:
    """A setting without checkpointing where only that is refused: what is left still has an error to be known."""
    plain = {knob: value for knob, value in knobs.items() if knob != "activation_checkpointing"}
    refused = [
        refuse(canonicalize(each, workload, hardware), workload, hardware)
        for each in (knobs, plain)
    ]
    return plain if refused[0] and not refused[1] else dict(knobs)


def seen(
    workload: Workload, hardware: Hardware, settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Figures]:
    """In a child: what is predicted of some configs, and what probes of them see, one after the other."""
    predicted = {
        name: predicted_peak(workload, hardware, knobs) for name, knobs in settings.items()
    }
    probed = {
        name: _probed(workload, hardware, knobs, _measured_here) for name, knobs in settings.items()
    }
    return {
        name: Figures(predicted[name][0], *probed[name], predicted[name][1]) for name in settings
    }


def predicted_peak(
    workload: Workload, hardware: Hardware, knobs: Mapping[str, Any]
) -> tuple[int | None, Answer]:
    """The peak of a config, and how predicting it went."""
    peaks: list[int] = []
    answer = answer_of(
        lambda: peaks.append(peak_of(trace(workload, knobs, hardware), hardware).nbytes)
    )
    return (peaks[0] if peaks else None), answer


def _measured_here(workload: Workload, request: Request, *, number: int) -> Measurement:
    return measure(workload, request)


def _probed(
    workload: Workload,
    hardware: Hardware,
    knobs: Mapping[str, Any],
    measured: Callable[..., Measurement],
) -> tuple[int | None, Answer]:
    """The peak that a probe judges by, as in a search."""
    try:
        config = canonicalize(knobs, workload, hardware)
        request = Request(
            config, hardware, Budget(int(MEMORY_GIB * GIB), hardware.host_free_bytes), _BRIEF
        )
        measurement = measured(workload, request, number=0)
    except AutofitError as error:
        return None, Answer("refused", str(error))
    if measurement.fits and measurement.peak_bytes:
        return measurement.peak_bytes.allocated, Answer("works")
    outcome = "refused" if measurement.outcome is Outcome.REFUSED else "fails"
    reason = measurement.reason or "no reason given"
    return None, Answer(
        outcome, reason if outcome == "refused" else f"{measurement.outcome.value}: {reason}"
    )


def _searched(model: str, executor: Executor, options: Mapping[str, Any]) -> None:
    sizes = _as_of_search(options)
    with tempfile.TemporaryDirectory() as folder, _in_one_zygote(executor):
        out = Path(folder) / "run"
        given = {
            "device": "cpu",
            "mem": MEMORY_GIB,
            "trials": TRIALS,
            "space": str(SPACE),
            "store": False,
            "out": out,
        }
        result = search(model, **sizes, **given)
        reasons = [each.reason for each in result.trials if each.reason]
        assert result.best is not None, f"nothing was found: {reasons}"
        assert (out / "result.yaml").exists() and (out / "report.html").exists(), (
            "files are missing"
        )


def _commanded(model: str, options: Mapping[str, Any]) -> None:
    words = [
        sys.executable,
        "-m",
        "autofit",
        "search",
        "--model",
        model,
        "--device",
        "cpu",
        "--mem",
        f"{MEMORY_GIB:g}",
    ]
    words += ["--space", str(SPACE), "--trials", str(TRIALS), "--no-store", "--json", "--quiet"]
    for name, value in _as_of_search(options).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--out", str(Path(folder) / "run")]
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    assert ended.returncode == 0, (
        f"exit code {ended.returncode}: {ended.stdout[-500:]}{ended.stderr[-500:]}"
    )
    assert json.loads(ended.stdout)["best"], ended.stdout[-500:]


def _as_of_search(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `resolve` under the names that a search has for them."""
    names = {"sequence_length": "seq_len", "effective_batch_size": "effective_batch"}
    return {names.get(name, name): value for name, value in options.items()}


@contextlib.contextmanager
def _in_one_zygote(executor: Executor) -> Iterator[None]:
    """Searches start no zygote of their own, which takes seconds, time few steps, and follow none for the report: not
    speed is asked here."""
    brief: dict[str, Any] = dict.fromkeys(
        ("EXPLORE_PLAN", "VERIFY_PLAN"), Plan(min_steps=1, max_steps=2)
    )
    briefly = functools.partial(predict_all, measuring=0.02)
    brief["LocalExecutor"] = lambda *_: contextlib.nullcontext(executor)
    with (
        mock.patch.multiple("autofit.tuning.measured", **brief),
        mock.patch("autofit.tuning.forecast.predict_all", briefly),
        mock.patch("autofit.tuning.annotations.Annotator.timelines", lambda *_: {}),
    ):
        yield


def plain(row: Row) -> dict[str, Any]:
    """The row as JSON holds it."""
    return asdict(row)
