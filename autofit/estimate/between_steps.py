"""What happens between two steps, on fake tensors: an evaluation, and the saving of checkpoint and
model.

Each runs the code of the training, beside what rests between steps.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from autofit.core.errors import describe_error
from autofit.core.hardware import Hardware
from autofit.estimate.recorder import HOST, Event, Recorder
from autofit.setup import Setup
from autofit.training import host_tensors, random_state
from autofit.training.checkpoint import contents_to_save, sample_of, sampled_weights
from autofit.training.evaluation import evaluate
from autofit.training.host_tensors import detached
from autofit.training.local_batch import LocalBatch
from autofit.training.save_model import tensors_to_save

EVALUATION = "evaluation"
SAVING = "saving"


def events_between_steps(
    setup: Setup,
    hardware: Hardware,
    recorder: Recorder,
    micro_batch: Callable[[], list[Any]],
) -> dict[str, tuple[Event, ...]]:
    """The events of an evaluation and of a saving, of which neither is part of the step.

    One that cannot be followed is left out; an assumption of the recorder says why.

    Args:
        micro_batch: makes one, followed by what else is held beside it.
    """

    def evaluated() -> None:
        first, *_beside = micro_batch()
        evaluate(setup, [LocalBatch(first)])

    found = {}
    for what, run in ((EVALUATION, evaluated), (SAVING, lambda: _save(setup, hardware))):
        try:
            with recorder.apart() as events, _readable(hardware, recorder):
                run()
                labels = recorder.labels
                on_device = [event for event in events if labels.get(event.storage) != HOST]
                found[what] = tuple(on_device)
        except Exception as error:  # of the model's own code, which needs values
            reason = describe_error(error)
            recorder.assumptions[f"what {what} takes could not be followed ({reason})."] = None

    return found


def _save(setup: Setup, hardware: Hardware) -> None:
    """Make what a checkpoint holds, then what is saved of the model, and write neither.

    What ranks tell each other of their parts, some KB for each tensor, is not counted.
    """
    random_numbers = None
    if hardware.device == "cpu":  # else they are on the host
        random_numbers = torch.empty(torch.get_rng_state().numel(), dtype=torch.uint8)

    held = contents_to_save(setup)
    del random_numbers
    _sample_each_kind(setup)
    del held

    files, _state = tensors_to_save(setup)
    for file in files:
        detached(file.tensors.items())


def _sample_each_kind(setup: Setup) -> None:
    """Take values of frozen weights, as a digest does of all: of one of each kind, since what one
    takes is freed before the next."""
    seen = set()
    for _, weight in sampled_weights(setup):
        divided = getattr(weight, "placements", None)
        kind = (weight.shape, weight.stride(), weight.dtype, divided)
        if kind not in seen:
            seen.add(kind)
            sample_of(weight)


@contextmanager
def _readable(hardware: Hardware, recorder: Recorder) -> Iterator[None]:
    """Let tensors be copied to the host, compared and read, which fake ones have no memory for.

    Where the device has a memory of its own, what is made on the host is no part of it.
    """

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        is_there = hardware.device == "cpu" or recorder.is_on_host(tensor)
        return tensor if is_there else recorder.to_host(tensor)

    def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return np.zeros(tensor.shape, np.uint8)  # files are made of bytes

    def storage_address(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    detach = torch.Tensor.detach

    def detached_of_host(tensor: torch.Tensor) -> torch.Tensor:
        """Of weights that rest on the host a state dict takes the host's.

        A view of one here would fill its storage, as one on a device does not.
        """
        is_resting = tensor.numel() and not tensor.untyped_storage().nbytes()
        return tensor if is_resting else detach(tensor)

    with ExitStack() as stack:
        for owner, name, replacement in (
            (random_state, "capture", lambda _: {}),
            (random_state, "restore", lambda _state, _device: None),
            (torch.Tensor, "detach", detached_of_host),
            (torch.Tensor, "cpu", to_host),
            (FakeTensor, "numpy", to_numpy),
            (host_tensors, "storage_address", storage_address),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))

        yield
