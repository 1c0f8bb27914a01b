"""A model that is built as a config says, and its optimizer step: what every training loop repeats.

`fit` repeats it in a loop of autofit's own, `autofit.prepare` hands it to a loop of the user's.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError, OutOfMemoryError, pluralize, sentence
from autofit.core.hardware import Hardware
from autofit.core.layout import Layout
from autofit.core.workload import Hyperparameters, Rows, Workload
from autofit.data.batch import few_samples
from autofit.distributed.group import devices_of_group
from autofit.hardware import segments
from autofit.hardware.device import detect
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup.adapters import new_token_rows
from autofit.training import random_state
from autofit.training.build import build
from autofit.training.inspect import Prover, try_loss
from autofit.training.loop import SEARCH_AGAIN, Listener
from autofit.training.packed_samples import note_of_mixed_samples
from autofit.training.user_model import restored


@contextmanager
def on_device(
    workload: Workload,
    model: nn.Module,
    device: str | None,
    listener: Listener,
) -> Iterator[Hardware]:
    """Inside, the user's model may be built and trained; afterwards its modes are as they were.

    Memory that runs out outside of steps, which recover by themselves, is named: it may run out
    where weights get to the device, in the first try of the loss, and in callbacks.
    """
    restoring = restored(model, dtypes=workload.keeps is not None)
    with segments.as_in_probes(device, listener), restoring:
        try:
            yield detect(device).of_several(*devices_of_group())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"memory ran out outside of a step: {sentence(error)}.",
                SEARCH_AGAIN,
            ) from error


class Prepared:
    """The user's model, built in place, with its optimizer, until `close` gives it back.

    What a probe of the same config measured runs here: the same `build` and the same step.

    Attributes:
        setup: the model, the optimizer, and the rest of what was built.
        prover: finds out what the loss averages over.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        config: Mapping[str, Any],
        hardware: Hardware,
        hyperparameters: Hyperparameters,
        listener: Listener,
        *,
        is_evaluated: bool = False,
    ) -> None:
        """Build the model, and try its loss.

        Args:
            is_evaluated: whether the mean loss over several batches will be asked for.

        Raises:
            InputError: the loss fails, or the batch is to be split and the loss cannot be.
            RefusedError: a technique cannot be applied.
        """
        torch.manual_seed(hyperparameters.seed)
        model.zero_grad()  # earlier gradients would be added to those of the first step

        self.prover = Prover.of(workload, model, hardware)
        proven = _proven(workload, self.prover, config, listener, is_evaluated=is_evaluated)
        self.setup = build(
            proven,
            config,
            hardware,
            model=model,
            hyperparameters=hyperparameters,
        )
        try:
            for note in (*hardware.notes, *self.setup.warnings, *_untrained_rows(model)):
                listener(note)
            with random_state.preserved(self.setup.device):
                try_loss(self.setup)
                for note in _mixed_samples(workload, self):
                    listener(note)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model back without hooks and wrappers; adapters, weights and dtypes stay."""
        self.setup.close()


def _proven(
    workload: Workload,
    prover: Prover,
    config: Mapping[str, Any],
    listener: Listener,
    *,
    is_evaluated: bool,
) -> Workload:
    """The workload with what its loss averages over, where a batch is split or evaluated.

    Raises InputError where a batch is to be split and cannot be.
    """
    whole = workload.effective_batch_size
    on_several = Layout.of(config).dp_degree > 1
    is_split = on_several or (config.get("micro_batch_size") or whole) < whole
    if not is_split and not is_evaluated:
        return workload

    traits = prover.traits()
    if is_split and not traits.splits:
        remedy = f"Set micro_batch_size to {whole}, or leave the config to the search."
        if on_several:
            remedy = "Train on one device."
        raise InputError(traits.notes[-1], remedy)

    for note in traits.notes:
        if note not in workload.notes:
            listener(note)
    return dataclasses.replace(workload, traits=traits)


def _mixed_samples(workload: Workload, prepared: Prepared) -> list[str]:
    """A note where samples that are packed together may see one another."""
    batch = few_samples(workload, 2)
    if isinstance(batch, Rows):  # a file's, packed for what is known to keep them apart
        return []
    note = note_of_mixed_samples(prepared.setup, batch)
    return [note] if note else []


def _untrained_rows(model: nn.Module) -> list[str]:
    """A note on rows that were added to a token embedding which is frozen."""
    rows = new_token_rows(model)
    if not rows:
        return []
    return [
        f"the token embedding has {pluralize(rows, 'row')} more than the model it was loaded from, "
        "and is frozen: they stay as they were made. To train them, wrap the model with peft and "
        "trainable_token_indices, beside lora_rank 0, or train all weights."
    ]
