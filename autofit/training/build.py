"""build: a Workload and a Config become a Setup that can train, for probes and for the user's training alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.workload import Hyperparameters, Workload
from autofit.distributed import Ranks
from autofit.setup import Setup, Stage, Technique
from autofit.setup.state import WeightPlan
from autofit.techniques import all_techniques, canonicalize, refuse
from autofit.training.meta_model import materialize, meta_model_from
from autofit.training.model_state import set_for_training
from autofit.training.step import reached


def build(
    workload: Workload,
    config: Mapping[str, Any],
    hardware: Hardware,
    *,
    model: nn.Module | None = None,
    hyperparameters: Hyperparameters | None = None,
) -> Setup:
    """Put a training run together; raises RefusedError where a technique cannot be applied. `model` is the user's,
    changed in place; None: made by the workload's factory, with random weights that take memory only in their final
    dtype."""
    canonical = canonicalize(config, workload, hardware)
    reason = refuse(canonical, workload, hardware)
    if reason:
        raise RefusedError(reason)

    setup = Setup(
        workload=workload,
        config=canonical,
        hardware=hardware,
        device=torch.device(hardware.device),
        model=model if model is not None else meta_model_from(workload.model),
        hyperparameters=hyperparameters or Hyperparameters(),
        weights=WeightPlan(are_random=model is None),
        ranks=Ranks.of(Layout.of(canonical), torch.device(hardware.device)),
    )
    try:
        adapt(setup)
        materialize(setup)
        finish(setup)
    except BaseException as error:
        # Undo what was done to the user's model so far; with others only where they refuse the config, too, and would
        # not be waited for in vain.
        if not setup.ranks.are_several or isinstance(error, RefusedError):
            setup.close()
        raise

    if setup.ranks.are_several:
        # dropout of other samples is another one
        torch.manual_seed(setup.hyperparameters.seed + setup.ranks.sampler)
    return setup


def adapt(setup: Setup, *, traced: bool = False) -> None:
    """Apply the techniques that decide about weights, before there are any; `traced`: for fake tensors."""
    _apply(
        setup,
        [technique for technique in all_techniques() if technique.stage <= Stage.SHARD],
        traced,
    )


def finish(setup: Setup, *, traced: bool = False) -> None:
    """Apply the techniques that need the weights; `traced`: to fake ones."""
    set_for_training(setup)
    rest = [technique for technique in all_techniques() if technique.stage > Stage.SHARD]
    _apply(setup, [technique for technique in rest if technique.stage < Stage.COMPILE], traced)

    if setup.exchange.replicate:  # before anything is compiled for a batch of this size
        if traced:  # to find out what is reached would be a forward in the trace
            setup.exchange.replicate({parameter for _, parameter in setup.trainable()})
        else:
            setup.exchange.replicate(reached(setup))
    for action in setup.when_built:
        action()
    _apply(setup, [technique for technique in rest if technique.stage >= Stage.COMPILE], traced)


def _apply(setup: Setup, techniques: list[Technique], traced: bool) -> None:
    for technique in techniques:
        value = setup.config[technique.name]
        if value == technique.off and not technique.always:
            continue
        if traced:
            technique.trace(setup, value)
        else:
            technique.apply(setup, value)
