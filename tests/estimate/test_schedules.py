"""Schedules of blocks that are not all treated alike."""

from types import SimpleNamespace
from typing import Any

from autofit.estimate.schedules import mixed


def kind(name: str, trained: bool) -> Any:
    """Segments of a model whose blocks are all of a kind, frozen ones without a backward."""
    of_phase = {"forward": [f"{name} forward"], "backward": [f"{name} backward"] if trained else []}
    return SimpleNamespace(
        depth=SimpleNamespace(stand_in=lambda number: 0),
        times=lambda segment: 1,
        before_blocks=["embedding"],
        after_blocks=["head"],
        of=lambda phase, at: of_phase[phase],
    )


def test_frozen_blocks_leave_no_run_without_a_segment() -> None:
    frozen = kind("frozen", trained=False)
    trained = kind("trained", trained=True)
    schedule = mixed([frozen, frozen, trained, trained])
    assert all(run for run, _ in schedule)
    written = [(segment, repeats) for run, repeats in schedule for segment in run]
    assert ("frozen forward", 2) in written
    assert written[-1] == ("trained backward", 1)
