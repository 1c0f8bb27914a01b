"""build: a Workload and a Config become a Setup that can train, for probes and for users alike."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.workload import Hyperparameters, Workload
from autofit.distributed import Ranks
from autofit.setup import Setup, Stage
from autofit.setup.state import WeightPlan
from autofit.techniques import all_techniques, canonicalize, refuse
from autofit.training.frozen_models import make_frozen_models
from autofit.training.meta_model import materialize, meta_model_from
from autofit.training.model_state import set_for_training
from autofit.training.pipeline_cut import cut_into_stages
from autofit.training.step import reached


def build(
    workload: Workload,
    config: Mapping[str, Any],
    hardware: Hardware,
    *,
    model: nn.Module | None = None,
    hyperparameters: Hyperparameters | None = None,
) -> Setup:
    """Put a training run together; raises RefusedError where a technique cannot be applied.

    `model` is the user's, changed in place; None: made by the workload's factory, with random
    weights that take memory only in their final dtype.
    """
    canonical = canonicalize(config, workload, hardware)
    reason = refuse(canonical, workload, hardware)
    if reason:
        raise RefusedError(reason)

    device = torch.device(hardware.device)
    weights = WeightPlan(are_random=model is None)
    if model is None:
        model = meta_model_from(workload.model)
    setup = Setup(
        workload=workload,
        config=canonical,
        hardware=hardware,
        device=device,
        model=model,
        hyperparameters=hyperparameters or Hyperparameters(),
        weights=weights,
        ranks=Ranks.of(Layout.of(canonical), device),
    )
    try:
        with _on_all_stages(setup):
            adapt(setup)
            materialize(setup)
            finish(setup)
    except BaseException as error:
        # Undo what was done to the user's model so far. With other ranks only where they refuse the
        # config, too: else they would be waited for in vain.
        if not setup.ranks.are_several or isinstance(error, RefusedError):
            setup.close()
        raise

    if setup.part is not None:
        setup.part.is_together = True
    if setup.ranks.are_several:
        # dropout of other samples is another one
        torch.manual_seed(setup.hyperparameters.seed + setup.ranks.dp_rank)
    return setup


@contextmanager
def _on_all_stages(setup: Setup) -> Iterator[None]:
    """Fail on all stages of a pipeline where one fails inside: each of them builds something
    else."""
    if setup.ranks.layout.pipeline == 1:
        yield
        return
    with setup.ranks.together("to build the model"):
        yield


def adapt(setup: Setup, *, traced: bool = False) -> None:
    """Apply the techniques that decide about weights, before there are any; `traced`: for fake
    tensors."""
    make_frozen_models(setup)
    _apply(setup, Stage.WEIGHTS, Stage.ADAPT, traced)
    cut_into_stages(setup)
    _apply(setup, Stage.SHARD, Stage.SHARD, traced)


def finish(setup: Setup, *, traced: bool = False) -> None:
    """Apply the techniques that need the weights; `traced`: to fake ones."""
    set_for_training(setup)
    _apply(setup, Stage.BLOCKS, Stage.STEP, traced)

    if setup.exchange.replicate:  # before anything is compiled for a batch of this size
        if traced:  # to find out what is reached would be a forward in the trace
            setup.exchange.replicate({parameter for _, parameter in setup.trainable()})
        else:
            setup.exchange.replicate(reached(setup))
    for action in setup.when_built:
        action()
    _apply(setup, Stage.COMPILE, Stage.COMPILE, traced)


def _apply(setup: Setup, first: Stage, last: Stage, traced: bool) -> None:
    """Apply the techniques of some stages that the config switches on."""
    for technique in all_techniques():
        value = setup.config[technique.name]
        is_on = value != technique.off or technique.always
        if not is_on or not first <= technique.stage <= last:
            continue

        if traced:
            technique.trace(setup, value)
        else:
            technique.apply(setup, value)
