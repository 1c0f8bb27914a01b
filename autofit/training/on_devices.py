"""A session on several devices of this machine: one process each, trained weights back in the
model.

Weights travel in files without names, which all ranks map: the host holds them once, and nothing
stays in memory whoever is killed. The model's structure, the loader, the loss and the callbacks
travel by cloudpickle.
"""

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit.core.errors import InputError, OutOfMemoryError, as_input_error, describe_error
from autofit.distributed.group import TIMEOUT
from autofit.distributed.launcher import Said, on_ranks
from autofit.hardware.device import detect
from autofit.setup import Setup, Stage
from autofit.techniques import all_techniques, canonicalize
from autofit.training import atomic_writes, checkpoint
from autofit.training.build import adapt
from autofit.training.checkpoint_policy import describe_batch_split
from autofit.training.evaluation import EvaluationPlan
from autofit.training.host_tensors import Tensors, detached, gathered
from autofit.training.meta_model import materialize, meta_copy
from autofit.training.session import Answer, Session
from autofit.training.user_model import restored

_SHARED = Path("/dev/shm")  # memory that processes share, where there is room


@dataclasses.dataclass(frozen=True)
class _Job:
    """A session without its weights, as ranks get it."""

    session: Session
    given: Path  # weights
    trained: Path
    config: Mapping[str, Any]
    device: str
    loader: Any
    options: Mapping[str, Any]  # of `Session.run`


def run_on_devices(
    session: Session,
    config: Mapping[str, Any],
    device: str,
    loader: Any,
    *,
    devices: int,
    steps: int,
    epochs: int | None = None,
    evaluation: EvaluationPlan | None = None,
    timeout: float = TIMEOUT,
) -> Answer:
    """What `Session.run` does, on so many devices.

    Where memory runs out on one of them, all go back to the last checkpoint, or to the start, with
    a smaller micro-batch. `timeout`: seconds that one rank waits for another.
    """
    weights = _plain_weights(session.model)
    folder = _roomy_folder(weights)
    with _nameless(folder) as given, _nameless(folder) as trained:
        _write(weights, given)
        options = {"steps": steps, "epochs": epochs, "evaluation": evaluation}
        job = _Job(_without_weights(session), given, trained, config, device, loader, options)

        answer = None
        while answer is None:
            try:
                answer = on_ranks(
                    _train,
                    job,
                    count=devices,
                    device=device,
                    timeout=timeout,
                    said=session.listener,
                )
            except OutOfMemoryError as error:
                if not error.knobs:
                    raise
                words = describe_batch_split(error.knobs)
                session.listener(f"{error.message[:-1]}: all start again, with {words}.")
                job = _smaller(job, error.knobs)

        _take_back(session, config, device, trained)
    return answer  # type: ignore[no-any-return]


def _without_weights(session: Session) -> Session:
    """The session for other processes: without weights, and what only this process can call."""
    structure = meta_copy(session.model)
    return dataclasses.replace(
        session,
        workload=dataclasses.replace(session.workload, model=lambda: structure),
        model=structure,
        callbacks=tuple(session.callbacks),
        listener=print,  # each rank's session gets its own
        restart=None,
    )


def _smaller(job: _Job, knobs: Mapping[str, Any]) -> _Job:
    """The job from the last checkpoint, or from the start, with knobs that need less memory."""
    policy = job.session.policy
    is_resumed = policy.directory is not None and checkpoint.exists(policy.directory)

    session = dataclasses.replace(
        job.session, policy=dataclasses.replace(policy, resume=is_resumed)
    )
    return dataclasses.replace(job, session=session, config={**job.config, **knobs})


def _train(say: Said, job: _Job) -> Answer:
    """One rank's session."""
    weights = _mapped(job.given)
    structure = job.session.model

    made = {}
    for name, parameter in structure.named_parameters():
        made[parameter] = nn.Parameter(weights[name], parameter.requires_grad)
    for module in structure.modules():
        for name, held in module._parameters.items():
            if held is not None:
                module._parameters[name] = made[held]

    session = dataclasses.replace(job.session, listener=say, taken=partial(_give, job.trained))
    return session.run(job.config, job.device, job.loader, **job.options)


def _give(path: Path, setup: Setup) -> None:
    """Leave what training changed for the process that started this one."""
    changed = gathered(dict(setup.trainable()) | dict(setup.model.named_buffers()), setup.ranks)

    if setup.ranks.is_first:
        _write(detached(changed.items()), path)


@torch.no_grad()
def _take_back(session: Session, config: Mapping[str, Any], device: str, path: Path) -> None:
    """Load what was trained into the user's model, where it is.

    Before, do to it what the config does to weights (formats, adapters). Quantised weights go to
    the device, which rounds them as the ranks' did.
    """
    model = session.model
    workload = session.workload
    on_device = device
    if config.get("quantization", "none") == "none":
        on_device = next(model.parameters()).device.type

    knobs = {}
    for technique in all_techniques():
        if technique.stage <= Stage.ADAPT and technique.name in config:
            knobs[technique.name] = config[technique.name]

    with restored(model, dtypes=workload.keeps is not None):
        hardware = detect(on_device)
        setup = Setup(
            workload,
            canonicalize(knobs, workload, hardware),
            hardware,
            torch.device(hardware.device),
            model,
            session.hyperparameters,
        )
        adapt(setup)
        materialize(setup)

        trained = _mapped(path)
        for name, tensor in (*setup.trainable(), *model.named_buffers()):
            tensor.copy_(trained[name])
        setup.close()


def _plain_weights(model: nn.Module) -> Tensors:
    """The weights of a model by their names, each once, as safetensors takes them.

    Raises InputError for others than plain ones.
    """
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            kind = type(parameter).__name__
            raise InputError(
                f"{name} of the model is a {kind}, which cannot be given to several processes.",
                "Load plain weights: the knob quantization quantises them.",
            )
    return detached(model.named_parameters())


@contextmanager
def _nameless(folder: Path) -> Iterator[Path]:
    """A path to an empty file that is gone when this process is.

    It serves this process and those that it starts.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def _write(tensors: Tensors, path: Path) -> None:
    """Fill such a file; libraries that rename one of their own cannot."""
    failure = "the weights cannot be given to other processes"
    remedy = f"Make room in {_SHARED}, or in the directory of temporary files (TMPDIR)."
    with (
        as_input_error(lambda error: f"{failure}: {describe_error(error)}.", remedy),
        path.open("wb") as file,
    ):
        torch.save(tensors, file)


def _mapped(path: Path) -> Tensors:
    """The tensors of such a file, in the memory that all processes share."""
    return torch.load(path, mmap=True, weights_only=True)  # type: ignore[no-any-return]


def _roomy_folder(tensors: Tensors) -> Path:
    """Where weights lie in memory twice at most, else where temporary files lie."""
    needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    free = atomic_writes.free_bytes(_SHARED) or 0

    if free > 3 * needed:
        return _SHARED
    return Path(tempfile.gettempdir())
