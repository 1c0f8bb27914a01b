"""What evaluations and saving are predicted to need beside what rests between steps, before a
training starts."""

from collections.abc import Iterator, Mapping

from torch import nn

from autofit.core.config import Value
from autofit.core.errors import AutofitError
from autofit.core.estimate import Estimate
from autofit.core.options import SearchOptions
from autofit.core.workload import Workload
from autofit.hardware.device import detect, usual_kind
from autofit.probe import LocalExecutor
from autofit.report.formatting import gib
from autofit.training import random_state
from autofit.training.workload import without_weights
from autofit.tuning.changed_world import estimate_on_budget, free_budget

_SECONDS = 300.0  # for following one step


def notes_between_steps(
    config: Mapping[str, Value],
    workload: Workload,
    model: nn.Module,
    *,
    options: SearchOptions,
    device: str | None,
    world: int,
    is_evaluated: bool,
    is_saved: bool,
    starts_ranks: bool = False,
) -> Iterator[str]:
    """A sentence where an evaluation, or saving, is predicted to take more than may be used.

    Nothing of what cannot be predicted.

    Args:
        starts_ranks: whether other processes train, whose devices this one must not touch.
    """
    device = device or usual_kind()
    try:
        copy = without_weights(workload, model)
        if starts_ranks and device != "cpu":
            found = _in_child(config, copy, options, device, world)
        else:
            hardware = detect(device).of_several(world)
            with random_state.preserved():
                found = estimate_on_budget(copy, config, hardware, free_budget(options, hardware))
    except AutofitError:
        return

    assert found.budget, "it was predicted for one"
    usable = found.budget.cap_bytes(device)
    for what, happens, tensors in (
        ("an evaluation", is_evaluated, found.evaluation_bytes),
        ("saving", is_saved, found.saving_bytes),
    ):
        needed = (tensors or 0) + found.breakdown["context"]
        if happens and needed > usable:
            yield (
                f"{what} is predicted to take {gib(needed)} GiB, and {gib(usable)} GiB may be used."
            )


def _in_child(
    config: Mapping[str, Value], copy: Workload, options: SearchOptions, device: str, world: int
) -> Estimate:
    with LocalExecutor() as executor:
        hardware = executor.detect(device).of_several(world)
        return executor.run(  # type: ignore[no-any-return]
            estimate_on_budget,
            copy,
            config,
            hardware,
            free_budget(options, hardware),
            log="estimate.log",
            timeout=_SECONDS,
        )
