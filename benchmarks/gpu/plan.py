"""What would be done with so many minutes on a card, step by step, and what each step tells: for reading beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.cases import FIRST
from benchmarks.gpu.listed import Listed, read_list

# Seconds, as forty minutes on two cards took them.
_INSTALLING, _SEARCH, _TRAINING = 45.0, 240.0, 170.0
_BUILD, _STEPS, _COMPILING, _PROFILING = 6.0, 4.0, 37.0, 12.0
_STREAMED = 8.0  # more to build and to pin


@dataclass(frozen=True)
class Step:
    """One step: the seconds that it is expected to take, what it does, and what that tells."""

    seconds: float
    does: str
    tells: str


def before_the_list() -> list[Step]:
    """What first.sh begins with."""
    installing = Step(
        _INSTALLING, "first.sh: start, install wheels, compile bytecode", "which versions there are"
    )
    tells = "how good the search is, and where its time goes"
    return [
        installing,
        Step(_SEARCH, "first.sh: search of the 8B model within 24 GiB, 180 s and finals", tells),
    ]


def of_the_list() -> list[Step]:
    """The configs that first.sh measures, what tells most first."""
    return [
        Step(expected_seconds(case), f"first.sh: {case.name}", case.tells)
        for case in read_list(FIRST)
    ]


def after_the_list() -> list[Step]:
    """What second.sh does, for which time is kept."""
    tells = "whether training is as fast as its probe, in the same memory"
    return [
        Step(
            _TRAINING, "second.sh: quick search of a 1.5B model, its train.py, autofit train", tells
        )
    ]


def expected_seconds(case: Listed) -> float:
    """What a case of a list takes, as probes of its kind took on cards."""
    seconds = _BUILD + (_PROFILING if case.profile else _STEPS)
    if case.knobs.get("parameter_offload", "none") != "none":
        seconds += _STREAMED
    if case.knobs.get("compile", "none") != "none":
        seconds += _COMPILING
    return min(seconds, case.seconds)


def told(minutes: float) -> str:
    """The plan for so many minutes: what there is time for, and what there is not."""
    last = after_the_list()
    kept = sum(step.seconds for step in last)
    lines = [f"{minutes:g} minutes on a card, its start included:", ""]
    now = 0.0
    for step in [*before_the_list(), *of_the_list()]:
        fits = now + step.seconds <= minutes * 60 - kept
        lines += _lines(step, now if fits else None)
        now += step.seconds if fits else 0.0
    for step in last:
        lines += _lines(step, now if now + step.seconds <= minutes * 60 else None)
        now += step.seconds
    return "\n".join(lines)


def _lines(step: Step, begins: float | None) -> list[str]:
    when = "no time" if begins is None else f"{int(begins) // 60:d}:{int(begins) % 60:02d}"
    return [f"{when:>7s}  {step.seconds:4.0f} s  {step.does}", f"{'':17s}{step.tells}"]
