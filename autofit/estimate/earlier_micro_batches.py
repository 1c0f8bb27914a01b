"""What earlier micro-batches of a step leave to the one that is traced: gradients, and the order in
which FSDP gathers weights ahead."""

from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any
from unittest import mock

from autofit.core.config import Config
from autofit.core.layout import Layout
from autofit.estimate.recorder import Recorder
from autofit.setup import Setup
from autofit.setup.sharding import prefetch_as_after
from autofit.training.step import accumulate


def averages_last(config: Config) -> bool:
    """Whether ranks average gradients behind the last micro-batch alone, not behind each."""
    is_sharded = config.data_parallel == "fsdp"
    return not is_sharded or Layout.of(config).replicate > 1 or bool(config.lora_rank)


class Turn(Enum):
    """Which micro-batch of a step is traced.

    FIRST finds no gradients. LATER ones add theirs to those of earlier ones. Before a DRAIN another
    backward came, and no forward: FSDP gathers nothing ahead for it.
    """

    FIRST = auto()
    LATER = auto()
    DRAIN = auto()


def after_forwards(setup: Setup, forwards: int) -> AbstractContextManager[Any]:
    """Inside, the backward finds that so many forwards came before it."""
    sync_gradients = setup.exchange.sync_gradients

    def sync(is_last: bool) -> None:
        prefetch_as_after(setup.model, forwards)
        sync_gradients(is_last)

    return mock.patch.object(setup.exchange, "sync_gradients", sync)


def leave_own_gradients(setup: Setup, batch: Any, recorder: Recorder) -> None:
    """A micro-batch whose gradients are averaged over ranks after the last one only, kept until
    then."""
    before = set(recorder.living)
    sync_gradients = setup.exchange.sync_gradients
    with mock.patch.object(setup.exchange, "sync_gradients", lambda is_last: sync_gradients(False)):
        accumulate(setup, batch)
    setup.progress.phase = "forward"
    recorder.mark("state")
    recorder.labels |= dict.fromkeys(recorder.living - before, "gradients")
