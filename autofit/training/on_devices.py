"""A session on several devices of this machine: one process for each, and the trained weights back in the user's model.

Weights travel in files without names, which all ranks map: the host holds them once, and nothing stays in memory
whoever is killed. The model's structure, the loader, the loss and the callbacks travel by cloudpickle.
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
from autofit.training.loop import StepReport
from autofit.training.meta_model import materialize, meta_copy
from autofit.training.save_model import gathered
from autofit.training.session import Session
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
    eval_loader: Any = None,
    timeout: float = TIMEOUT,
) -> tuple[list[StepReport], list[float]]:
    """What `Session.run` does, on so many devices. Where memory runs out on one of them, all go back to the last
    checkpoint, or to the start, with a smaller micro-batch. `timeout`: seconds that one rank waits for another."""
    named = _plain(session.model)
    folder = _roomy(named)
    with _nameless(folder) as given_weights, _nameless(folder) as trained:
        _write(named, given_weights)

        options = {"steps": steps, "epochs": epochs, "eval_loader": eval_loader}
        job = _Job(
            _without_weights(session), given_weights, trained, config, device, loader, options
        )

        while True:
            try:
                answer = on_ranks(
                    _train,
                    job,
                    count=devices,
                    device=device,
                    timeout=timeout,
                    said=session.listener,
                )
                break
            except OutOfMemoryError as error:
                if not error.knobs:
                    raise

                session.listener(
                    f"{error.message[:-1]}: all start again, with {_told(error.knobs)}."
                )
                directory = session.policy.directory
                is_resumed = directory is not None and checkpoint.exists(directory)
                again = dataclasses.replace(
                    job.session, policy=dataclasses.replace(session.policy, resume=is_resumed)
                )
                job = dataclasses.replace(job, session=again, config={**job.config, **error.knobs})

        _take_back(session, config, device, trained)
    return answer  # type: ignore[no-any-return]


def _without_weights(session: Session) -> Session:
    """The session with a copy of its model that has no weights, and with nothing that only this process can call."""
    structure = meta_copy(session.model)
    return dataclasses.replace(
        session,
        workload=dataclasses.replace(session.workload, model=lambda: structure),
        model=structure,
        callbacks=tuple(session.callbacks),
        listener=print,  # each rank's session gets its own
        restart=None,
    )


def _train(say: Said, job: _Job) -> tuple[list[StepReport], list[float]]:
    """One rank's session."""
    weights = _mapped(job.given)
    structure = job.session.model

    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in structure.named_parameters():
        made[parameter] = nn.Parameter(weights[name], parameter.requires_grad)
    for module in structure.modules():
        for name, held in module._parameters.items():
            if held is not None:
                module._parameters[name] = made[held]

    session = dataclasses.replace(job.session, listener=say, taken=partial(_give, job.trained))
    return session.run(job.config, job.device, job.loader, **job.options)


def _give(path: Path, setup: Setup) -> None:
    """Leave what training changed for the caller."""
    changed = gathered(dict(setup.trainable()) | dict(setup.model.named_buffers()), setup.ranks)
    if setup.ranks.is_first:
        _write(checkpoint.detached(changed.items()), path)


@torch.no_grad()
def _take_back(session: Session, config: Mapping[str, Any], device: str, path: Path) -> None:
    """Do to the user's model what the config does to weights (formats, adapters), where it is, and load what was
    trained. Quantised weights go to the device, which rounds them as the ranks' did."""
    model = session.model
    home = next(model.parameters()).device.type
    kept = {each.name for each in all_techniques() if each.stage <= Stage.ADAPT}
    with restored(model, dtypes=session.workload.keeps is not None):
        hardware = detect(home if config.get("quantization", "none") == "none" else device)
        plain = canonicalize(
            {knob: config[knob] for knob in config if knob in kept}, session.workload, hardware
        )
        setup = Setup(
            session.workload,
            plain,
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


def _plain(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model by their names, each once, as safetensors takes them. Raises InputError for others."""
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            message = f"{name} of the model is a {type(parameter).__name__}, which cannot be given to several processes"
            raise InputError(
                f"{message}.", "Load plain weights: the knob quantization quantises them."
            )
    return checkpoint.detached(model.named_parameters())


@contextmanager
def _nameless(folder: Path) -> Iterator[Path]:
    """A path, for this process and those that it starts, to an empty file that is gone when this process is."""
    with tempfile.TemporaryFile(dir=folder) as file:
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def _write(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Fill such a file; libraries that rename one of their own cannot."""
    remedy = f"Make room in {_SHARED}, or in the directory of temporary files (TMPDIR)."
    says = "the weights cannot be given to other processes"
    with (
        as_input_error(lambda error: f"{says}: {describe_error(error)}.", remedy),
        path.open("wb") as file,
    ):
        torch.save(dict(tensors), file)


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, mmap=True, weights_only=True)  # type: ignore[no-any-return]


def _roomy(tensors: Mapping[str, torch.Tensor]) -> Path:
    """Where weights lie in memory twice at most, else where temporary files lie."""
    needed = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    free = atomic_writes.free_bytes(_SHARED) or 0
    return _SHARED if free > 3 * needed else Path(tempfile.gettempdir())


def _told(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{knob} {value}" for knob, value in knobs.items())
