"""Checkpoints: the whole state of a training run, one atomic directory each.

`checkpoints/step-00000200/` holds what training changes in 200 steps: trained weights and buffers (safetensors), the
state of scaler, random numbers and data (JSON), that of the optimizer (read with `weights_only=True`: libraries have
tensors of their own), and `checkpoint.yaml`, which names the run and holds the checksums of all files, its own last.
Nothing that is read can run code. Several ranks write one together: each its parts of the weights and of the
optimizer's state (`sharded_state`) and its random numbers. Any number of ranks reads either.
"""

import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves

from autofit.core import strict_yaml
from autofit.core.errors import InputError, as_input_error, describe_error
from autofit.core.files import checksum
from autofit.core.hardware import MIB
from autofit.core.knobs import KNOBS
from autofit.core.workload import check_counts
from autofit.distributed import Ranks
from autofit.setup import Setup
from autofit.setup.host_copies import plain_tensors
from autofit.setup.sharding import whole
from autofit.setup.streamed_blocks import updated_on
from autofit.techniques import all_techniques
from autofit.training import adapter_files, atomic_writes, json_state, random_state, sharded_state
from autofit.training.checkpoint_schema import (
    STATE_FIELDS,
    DamagedError,
    check_label,
    check_optimizer,
    check_state,
    check_tensors,
)
from autofit.training.optimizer_schema import OptimizerSchema

FOLDER = "checkpoints"
_LABEL = "checkpoint.yaml"
_WEIGHTS = "weights.safetensors"
_BUFFERS = "buffers.safetensors"
_STATE = "state{}.json"  # ranks after the first put their numbers in
_OPTIMIZER = "optimizer{}.pt"  # as above
_PARTS = "parts"  # in what was read: the tensors of which each rank wrote a part
_FORMAT = 3
_OWN_SUM = "label_crc32"
_STEP = re.compile(r"step-(\d{8,})")
_ANEW = "Train again without resume."
_SAMPLES = 16  # values of a frozen weight that tell it from another one


@dataclass(frozen=True)
class Loaded:
    """Where a run continues: the next step, the saved position in the data, and notes for the user."""

    next_step: int
    data_state: Any = None
    notes: tuple[str, ...] = ()


def exists(directory: Path) -> bool:
    """Whether an output directory holds a checkpoint."""
    return bool(_steps(directory))


def save(
    setup: Setup, directory: Path, next_step: int, *, keep_last: int = 2, data_state: Any = None
) -> Path:
    """Write the state after step `next_step - 1`; then remove all but the last `keep_last` checkpoints. On a GPU, the
    host holds a copy of the trained weights meanwhile. `data_state` is as `json_state.encoded` makes it. Where writing
    fails (InputError), earlier checkpoints stay."""
    check_counts(keep_last=keep_last)
    ranks = setup.ranks
    files: dict[str, Any] = {}
    parts: dict[str, torch.Tensor] = {}  # of this rank
    optimizer_numbers = None
    if ranks.are_several:
        parts = {name: weight.detach() for name, weight in setup.trainable()}
        if by_name := sharded_state.optimizer_state(setup):
            tensors, optimizer_numbers = by_name
            parts |= tensors

    state = {
        "names": sharded_state.names_of(setup),
        "ranks": ranks.layout.world,
        "random": random_state.capture(setup.device),
        "optimizer_numbers": optimizer_numbers,
        "scaler": setup.scaler.state_dict() if setup.scaler else None,
        "skipped_updates": setup.progress.skipped_updates,
    }
    files[_of(_STATE, ranks.rank)] = json.dumps({**json_state.encoded(state), "data": data_state})
    if optimizer_numbers is None:
        files[_of(_OPTIMIZER, ranks.rank)] = setup.optimizer.state_dict()
    if ranks.is_first:
        files[_BUFFERS] = detached(setup.model.named_buffers())
    if not ranks.are_several:
        files[_WEIGHTS] = detached(setup.trained_values())

    label = {
        "autofit_checkpoint": _FORMAT,
        "next_step": next_step,
        "model": setup.workload.name,
        "effective_batch_size": setup.workload.effective_batch_size,
        "config": dict(setup.config),
        "hyperparameters": asdict(setup.hyperparameters),
        "frozen_weights": _frozen_digest(setup),
        "ranks": ranks.layout.world,
        "versions": {"torch": str(torch.__version__)},
    }
    path = directory / FOLDER / f"step-{next_step:08d}"
    (largest,) = ranks.largest(
        _storage_bytes((files, parts)) + len(files[_of(_STATE, ranks.rank)]) + MIB
    )
    what = f"the checkpoint of step {next_step}"
    with atomic_writes.directory_of_all(
        ranks, path, what=what, needed_bytes=int(largest) * ranks.layout.world
    ) as part:
        for name, content in files.items():
            if name in (_WEIGHTS, _BUFFERS):
                safetensors.torch.save_file(content, part / name)
            elif isinstance(content, str):
                (part / name).write_text(content, encoding="utf-8")
            else:
                # given a path, torch would hide why the system failed
                with (part / name).open("wb") as file:
                    torch.save(content, file)
        written = [part / name for name in files]
        if parts:
            written += sharded_state.write(parts, part)
        checksums = ranks.joined({file.name: checksum(file) for file in written})
        if ranks.is_first:
            (part / _LABEL).write_text(
                _signed(strict_yaml.dump({**label, "crc32": checksums})), encoding="utf-8"
            )
    if not ranks.is_first:
        return path
    # Later checkpoints could not be read on the way to this step; left there, they would count as the newest.
    earlier = [path for step, path in _steps(directory) if step <= next_step]
    for _, existing in _steps(directory):
        if existing not in earlier[:keep_last]:
            atomic_writes.remove(existing)
    return path


def check_savable(setup: Setup) -> None:
    """Refuse, before training starts, state that no checkpoint or saved model can hold."""
    remedy = "Leave it out, or train without an output_dir."
    is_adapted = adapter_files.is_saved_as_adapters(setup.model)
    if is_adapted:
        adapter_files.check_savable(setup.model)
    state = {} if is_adapted else setup.model.state_dict()
    for name, value in (*setup.model.named_buffers(), *state.items()):
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{name} of the model's state is no tensor, and safetensors holds no other.", remedy
            )
        if value.layout is not torch.strided:
            raise InputError(f"{name} is a sparse tensor, which safetensors cannot hold.", remedy)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in setup.optimizer.param_groups
    ]
    file = io.BytesIO()
    message = "the state_dict of the optimizer holds more than plain values and tensors, which is not safe to load."
    with as_input_error(
        lambda _: message, "Leave out what is neither, such as objects of classes of your own."
    ):
        torch.save(groups, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def load(setup: Setup, directory: Path) -> Loaded:
    """Restore a run from its newest checkpoint, or the one before it where that is damaged."""
    damaged: list[str] = []
    schema = OptimizerSchema(setup.optimizer, is_own=setup.workload.optimizer is not None)
    for step, path in _steps(directory):
        label: dict[str, Any] = {}
        contents: dict[str, Any] = {}
        with _damage_noted(setup.ranks, step, damaged) as is_damaged:
            label |= _read_label(path)
            if label["next_step"] != step:
                raise DamagedError(f"{_LABEL} is not what was written")
            _check_agreement(path, _config_differences(setup, label))
            contents |= _read_contents(path, label, setup.ranks)
            check_state(setup, contents, label)
        if is_damaged():
            continue

        _check_agreement(path, _weight_differences(setup, label, contents[_WEIGHTS]))
        sharded_state.check_divides(setup, contents)
        with _damage_noted(setup.ranks, step, damaged) as is_damaged:
            check_tensors(setup, contents[_WEIGHTS], contents[_BUFFERS])
            check_optimizer(setup, contents, contents.get(_PARTS), schema)
        if is_damaged():
            continue

        _restore(setup, contents, path)
        notes = [
            f"{reason}; training goes on from that of step {label['next_step']}."
            for reason in damaged
        ]
        return Loaded(
            label["next_step"], contents["data"], (*notes, *_changed_settings(setup, label))
        )
    if damaged:
        raise InputError(f"no checkpoint in {directory} can be read: {damaged[0]}.", _ANEW)
    raise InputError(
        f"there is no checkpoint to resume in {directory}.",
        "Leave out resume, or check the directory.",
    )


@contextmanager
def _damage_noted(ranks: Ranks, step: int, damaged: list[str]) -> Iterator[Callable[[], bool]]:
    """Add a sentence on what is found to be damaged inside, on any rank; yields whether there was any."""
    before = len(damaged)
    damage: DamagedError | None = None
    try:
        yield lambda: len(damaged) > before
    except DamagedError as error:
        damage = error
    if ranks.largest(float(damage is not None))[0]:
        damaged.append(
            f"the checkpoint of step {step} is damaged ({damage or 'as another rank sees'})"
        )


def _of(name: str, rank: int) -> str:
    """The name of a file of one rank."""
    return name.format(f"-{rank}" if rank else "")


def _frozen_digest(setup: Setup) -> str:
    """A digest of some values of every frozen weight, which checkpoints do not hold. Read from the state dict, which
    includes weights that rest on the host. Quantised weights are left out: their bits depend on the device that rounded
    them."""
    frozen = {
        name for name, parameter in setup.model.named_parameters() if not parameter.requires_grad
    }
    digest = hashlib.sha256()
    for name, tensor in setup.model.state_dict().items():
        if name in frozen and tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel():
            values = whole(tensor.detach()).reshape(-1)[:: -(-tensor.numel() // _SAMPLES)]
            digest.update(
                name.encode() + values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()[:16]


def detached(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors as safetensors takes them: on the host, contiguous, and sharing no memory."""
    detached: dict[str, torch.Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in named:
        if tensor.dtype is torch.complex128:
            raise InputError(
                f"{name} is of complex128, which safetensors cannot hold.", "Make it complex64."
            )
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in addresses or storage.nbytes() != plain.numel() * plain.itemsize:
            plain = plain.clone(memory_format=torch.contiguous_format)
        addresses.add(storage.data_ptr())
        detached[name] = plain
    return detached


def _storage_bytes(value: Any) -> int:
    """The bytes of the tensors in nested containers, each storage counted once."""
    found = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    storages = [plain.untyped_storage() for tensor in found for plain in plain_tensors(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoints of an output directory by their steps, the newest first."""
    entries = (
        (_STEP.fullmatch(name), path)
        for name, path in atomic_writes.complete_entries(directory / FOLDER)
    )
    return sorted(((int(match[1]), path) for match, path in entries if match), reverse=True)


def _signed(text: str) -> str:
    return f"{text}{_OWN_SUM}: {zlib.crc32(text.encode())}\n"


def _is_signed(label: Path) -> bool:
    text = label.read_text(encoding="utf-8")
    return text == _signed(text[: text.rfind(_OWN_SUM)])


def _read_label(path: Path) -> dict[str, Any]:
    try:
        label = strict_yaml.load_mapping(path / _LABEL)
    except InputError as error:
        raise DamagedError(f"{_LABEL} cannot be read") from error
    check_label(label)
    is_older = label["autofit_checkpoint"] < _FORMAT and _OWN_SUM not in label
    if not is_older and not _is_signed(path / _LABEL):
        raise DamagedError(f"{_LABEL} is not what was written")
    if label["autofit_checkpoint"] != _FORMAT:
        message = f"the checkpoint {path} is of format {label['autofit_checkpoint']}, this autofit reads {_FORMAT}."
        raise InputError(message, "Resume it with the autofit that wrote it.")
    return label


def _read_contents(path: Path, label: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The contents of every other file, all of them checked before any is used; of weights that several ranks wrote,
    what they are. State goes to the host: each optimizer knows best what of it belongs on the device, and an offloaded
    one none. Tensors of a library's own class (torchao's) pass `weights_only`: that library, loaded with the optimizer,
    has registered them as safe."""
    contents: dict[str, Any] = {}
    state, optimizer = (
        _of(name, ranks.rank % int(label.get("ranks", 1))) for name in (_STATE, _OPTIMIZER)
    )
    read = {_WEIGHTS, _BUFFERS, state, optimizer} & label["crc32"].keys()
    for number, name in enumerate(sorted(label["crc32"].keys() | {_BUFFERS, state})):
        file = path / name
        if name not in read and number % ranks.layout.world != ranks.rank:
            continue  # another rank checks it
        try:
            if checksum(file) != label["crc32"].get(name):
                raise DamagedError(f"{name} is not what was written")
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {error.strerror}") from error
        try:
            if name in (_WEIGHTS, _BUFFERS):
                contents[name] = safetensors.torch.load_file(file)
            elif name == state:
                found = json_state.loads(file.read_text(encoding="utf-8"))
                contents |= {key: found[key] for key in STATE_FIELDS & found.keys()}
            elif name == optimizer:
                contents["optimizer"] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever it stumbles over, with pages of advice
            raise DamagedError(f"{name} cannot be read ({type(error).__name__})") from error
    if _WEIGHTS not in label["crc32"]:
        try:
            contents[_PARTS] = sharded_state.described(path, label["crc32"].keys())
        except Exception as error:  # torch's reader, too
            raise DamagedError(f"its tensors cannot be read ({describe_error(error)})") from error
        contents[_WEIGHTS] = {
            name: each for name, each in contents[_PARTS].items() if name not in contents[_BUFFERS]
        }
    return contents


def _check_agreement(path: Path, differences: list[str]) -> None:
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        message = f"the checkpoint {path} is of another model or config: {'; '.join(differences[:3])}{more}."
        raise InputError(message, "Give the model and config it was made with.")


def _config_differences(setup: Setup, label: dict[str, Any]) -> list[str]:
    """The knobs by which the two would learn differently, or lay out the optimizer's state differently."""
    differences: list[str] = []
    layout = {name for name, knob in KNOBS.items() if knob.lays_out_state}
    if updated_on(setup.config) == "host" and setup.config.optimizer_offload == "cpu":
        # what rests on the host is stepped by an optimizer of its own
        layout.add("parameter_offload")
    for knob in all_techniques():
        mine = setup.config.get(knob.name, knob.off)
        theirs = label["config"].get(knob.name, knob.off)
        same = knob.exact(mine, setup.workload) and knob.exact(theirs, setup.workload)
        is_split = knob.name == "micro_batch_size"  # any split of a batch learns the same
        if mine != theirs and not is_split and (knob.name in layout or not same):
            differences.append(f"{knob.name} {_word(mine)}, checkpoint has {_word(theirs)}")
    return differences


def _weight_differences(
    setup: Setup, label: dict[str, Any], saved: dict[str, torch.Tensor]
) -> list[str]:
    mine = {name: list(parameter.shape) for name, parameter in setup.trainable()}
    theirs = {
        name: list(tensor.shape)
        for name, tensor in saved.items()
        if not sharded_state.is_of_optimizer(name)
    }
    both = [name for name in mine if name in theirs]
    differences = [
        f"weight {n} {mine[n]}, checkpoint has {theirs[n]}" for n in both if mine[n] != theirs[n]
    ]
    differences += [
        f"weight {name} is trained, checkpoint has none" for name in mine if name not in theirs
    ]
    differences += [
        f"weight {name} is not trained, checkpoint has one" for name in theirs if name not in mine
    ]
    if not differences and label.get("frozen_weights") != _frozen_digest(setup):
        differences = ["the frozen weights are not those that it was trained beside"]
    return differences


@torch.no_grad()
def _restore(setup: Setup, contents: dict[str, Any], path: Path) -> None:
    """Load everything into the setup. Weight decay stays as this run sets it, as the learning rate does."""
    buffers_of = setup.model.get_submodule
    # not every optimizer has one
    decays = [group.get("weight_decay") for group in setup.optimizer.param_groups]
    if _PARTS in contents:
        sharded_state.restore(setup, contents[_PARTS], contents, path)
    else:
        for name, value in setup.trained_values():
            value.copy_(sharded_state.own_part(contents[_WEIGHTS][name], value))
        if setup.ranks.are_several:
            sharded_state.divide_optimizer(setup, contents)
        else:
            with as_input_error(
                lambda error: (
                    f"the optimizer does not take its saved state: {describe_error(error)}."
                ),
                _ANEW,
            ):
                setup.optimizer.load_state_dict(contents["optimizer"])
    for name, values in contents[_BUFFERS].items():
        parent, _, own_name = name.rpartition(".")
        buffers = buffers_of(parent)._buffers
        buffer = buffers.get(own_name)
        if buffer is not None and buffer.shape == values.shape:
            buffer.copy_(values)
        else:  # one that the model makes or replaces while it runs
            buffers[own_name] = values.to(setup.device)
    for group, decay in zip(setup.optimizer.param_groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay
    if setup.scaler and contents["scaler"]:
        setup.scaler.load_state_dict(contents["scaler"])
    # an earlier autofit wrote none
    setup.progress.skipped_updates = contents.get("skipped_updates", 0)
    random_state.restore(contents["random"], setup.device)


def _changed_settings(setup: Setup, label: dict[str, Any]) -> list[str]:
    """A sentence for each hyperparameter that differs from the checkpoint's."""
    mine = {
        **asdict(setup.hyperparameters),
        "effective_batch_size": setup.workload.effective_batch_size,
    }
    theirs = {**label["hyperparameters"], "effective_batch_size": label.get("effective_batch_size")}
    changed = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    return [
        f"{name} is {_word(mine[name])} from here on, before it was {_word(theirs[name])}."
        for name in changed
    ]


def _word(value: Any) -> str:
    """A value as YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)
