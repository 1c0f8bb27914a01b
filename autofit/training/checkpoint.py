"""Checkpoints: the whole state of a training run, one atomic directory each.

A checkpoint holds what training changes. It can be resumed by the model and config that made it,
and by configs that learn the same: `load` compares the two before it changes anything.
"""

import copy
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autofit.core.errors import InputError, as_input_error, describe_error
from autofit.core.files import checksum
from autofit.core.hardware import MIB
from autofit.core.workload import check_counts
from autofit.distributed import Ranks
from autofit.setup import Setup
from autofit.setup.host_copies import plain_tensors
from autofit.setup.sharding import whole
from autofit.setup.streamed_blocks import updated_on
from autofit.techniques import all_techniques
from autofit.training import (
    adapter_files,
    atomic_writes,
    checkpoint_files,
    json_state,
    random_state,
    sharded_state,
)
from autofit.training.checkpoint_files import (
    BUFFERS,
    FORMAT,
    LABEL,
    PARTS,
    WEIGHTS,
    Contents,
    Label,
    optimizer_file,
    state_file,
)
from autofit.training.checkpoint_schema import (
    DamagedError,
    check_optimizer,
    check_state,
    check_tensors,
)
from autofit.training.host_tensors import Tensors, bytes_of, detached, gathered
from autofit.training.optimizer_schema import OptimizerSchema

_ANEW = "Train again without resume."
_SAMPLES = 16  # values of a frozen weight that tell it from another one
_MOST_DIFFERENCES = 3  # that a sentence names


@dataclass(frozen=True)
class Loaded:
    """Where a run continues: the next step, the saved position in the data, notes for the user."""

    next_step: int
    data_state: Any = None
    notes: tuple[str, ...] = ()


def exists(directory: Path) -> bool:
    """Whether an output directory holds a checkpoint."""
    return bool(checkpoint_files.steps(directory))


def save(
    setup: Setup,
    directory: Path,
    next_step: int,
    *,
    keep_last: int = 2,
    data_state: Any = None,
) -> Path:
    """Write the state after step `next_step - 1`; remove all but the last `keep_last` checkpoints.

    On a GPU, the host holds a copy of the trained weights meanwhile. `data_state` is as
    `json_state.encoded` makes it. Where writing fails (InputError), earlier checkpoints stay.
    """
    check_counts(keep_last=keep_last)
    ranks = setup.ranks
    files, parts = contents_to_save(setup, data_state)

    label = {
        "autofit_checkpoint": FORMAT,
        "next_step": next_step,
        "model": setup.workload.name,
        "effective_batch_size": setup.workload.effective_batch_size,
        "config": dict(setup.config),
        "hyperparameters": asdict(setup.hyperparameters),
        "frozen_weights": frozen_digest(setup),
        "ranks": ranks.layout.world,
        "versions": {"torch": str(torch.__version__)},
    }

    text = files[state_file(ranks.rank)]
    (most_bytes,) = ranks.largest(_storage_bytes((files, parts)) + len(text) + MIB)
    path = checkpoint_files.step_directory(directory, next_step)
    with atomic_writes.directory_of_all(
        ranks,
        path,
        what=f"the checkpoint of step {next_step}",
        needed_bytes=int(most_bytes) * ranks.layout.world,
    ) as folder:
        written = checkpoint_files.write(files, folder)
        if parts:
            written += sharded_state.write(parts, folder)

        checksums = ranks.joined({file.name: checksum(file) for file in written})
        if ranks.is_first:
            checkpoint_files.write_label({**label, "crc32": checksums}, folder)

    if ranks.is_first:
        _remove_others(directory, next_step, keep_last)
    return path


def contents_to_save(setup: Setup, data_state: Any = None) -> tuple[Contents, Tensors]:
    """What this rank writes: files by their names, and its parts of tensors that ranks divide."""
    ranks = setup.ranks
    parts: Tensors = {}
    optimizer_numbers = None

    if ranks.are_several:
        parts |= {name: weight.detach() for name, weight in setup.trainable()}
        by_name = sharded_state.optimizer_state(setup)
        if by_name is not None:
            tensors, optimizer_numbers = by_name
            parts |= tensors
            if setup.part is not None:  # of the weights of all stages
                optimizer_numbers = ranks.joined(optimizer_numbers)

    state = {
        "names": sharded_state.names_of(setup),
        "ranks": ranks.layout.world,
        "random": random_state.capture(setup.device),
        "optimizer_numbers": optimizer_numbers,
        "scaler": setup.scaler.state_dict() if setup.scaler else None,
        "skipped_updates": setup.progress.skipped_updates,
    }

    text = json.dumps({**json_state.encoded(state), "data": data_state})

    files: Contents = {state_file(ranks.rank): text}
    if optimizer_numbers is None:
        files[optimizer_file(ranks.rank)] = setup.optimizer.state_dict()

    buffers = dict(setup.model.named_buffers())
    if setup.part is not None:
        buffers = gathered(buffers, ranks)
    if ranks.is_first:
        files[BUFFERS] = detached(buffers.items())

    if not ranks.are_several:
        files[WEIGHTS] = detached(setup.trained_values())
    return files, parts


def frozen_digest(setup: Setup) -> str:
    """A digest of some values of every frozen weight, which checkpoints do not hold.

    It is of the state dict, which includes weights that rest on the host. Quantised weights are
    left out: their bits depend on the device that rounded them.
    """
    some = {name: sample_of(weight) for name, weight in sampled_weights(setup)}
    if setup.part is not None:  # as one device goes through all stages
        of_all = setup.ranks.joined(some)
        some = {name: of_all[name] for name in setup.part.names if name in of_all}

    digest = hashlib.sha256()
    for name, values_of_one in some.items():
        digest.update(name.encode() + values_of_one)

    return digest.hexdigest()[:16]


def sampled_weights(setup: Setup) -> Iterator[tuple[str, torch.Tensor]]:
    """The frozen weights that a digest takes values of, by their names."""
    frozen = set()
    for name, parameter in setup.model.named_parameters():
        if not parameter.requires_grad:
            frozen.add(name)

    for name, tensor in setup.model.state_dict().items():
        is_plain = tensor.is_floating_point() and tensor.itemsize > 1
        if name in frozen and is_plain and tensor.numel():
            yield name, tensor


def sample_of(weight: torch.Tensor) -> bytes:
    """Some values of a weight."""
    stride = -(-weight.numel() // _SAMPLES)
    return bytes_of(whole(weight.detach()).reshape(-1)[::stride])


def _storage_bytes(value: Any) -> int:
    """The bytes of the tensors in nested containers, each storage counted once."""
    sizes = {}

    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            for plain in plain_tensors(leaf):
                storage = plain.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()

    return sum(sizes.values())


def _remove_others(directory: Path, next_step: int, keep_last: int) -> None:
    """Remove all but the last checkpoints up to a step.

    Later ones could not be read on the way to this step; left there, they would count as newest.
    """
    kept = 0
    for step, path in checkpoint_files.steps(directory):
        if step <= next_step and kept < keep_last:
            kept += 1
        else:
            atomic_writes.remove(path)


def check_savable(setup: Setup) -> None:
    """Refuse, before training starts, state that no checkpoint or saved model can hold."""
    remedy = "Leave it out, or train without an output_dir."
    tensors = list(setup.model.named_buffers())
    if adapter_files.is_saved_as_adapters(setup.model):
        adapter_files.check_savable(setup.model)
    else:
        tensors += setup.model.state_dict().items()

    for name, value in tensors:
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{name} of the model's state is no tensor, and safetensors holds no other.", remedy
            )

        if value.layout is not torch.strided:
            raise InputError(f"{name} is a sparse tensor, which safetensors cannot hold.", remedy)

    settings = [{**group, "params": None} for group in setup.optimizer.param_groups]
    file = io.BytesIO()
    with as_input_error(
        lambda _: (
            "the state_dict of the optimizer holds more than plain values and tensors, "
            "which is not safe to load."
        ),
        "Leave out what is neither, such as objects of classes of your own.",
    ):
        torch.save(settings, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def load(setup: Setup, directory: Path) -> Loaded:
    """Restore a run from its newest checkpoint, or the one before it where that is damaged.

    Raises InputError where there is none, or where it is of another model or config.
    """
    damaged: list[str] = []
    schema = OptimizerSchema(setup.optimizer, is_own=setup.workload.optimizer is not None)

    for step, path in checkpoint_files.steps(directory):
        label: Label = {}
        contents: Contents = {}
        with _damage_noted(setup.ranks, step, damaged) as is_damaged:
            label |= checkpoint_files.read_label(path)
            if label["next_step"] != step:
                raise DamagedError(f"{LABEL} is not what was written")

            _check_agreement(path, _config_differences(setup, label))
            contents |= checkpoint_files.read_contents(path, label, setup.ranks)
            _leave_to_stages(setup, contents)
            check_state(setup, contents, label)

        if is_damaged():
            continue

        _check_agreement(
            path,
            _weight_differences(setup, label, contents[WEIGHTS]),
        )

        sharded_state.check_divides(setup, contents)
        with _damage_noted(setup.ranks, step, damaged) as is_damaged:
            check_tensors(setup, contents[WEIGHTS], contents[BUFFERS])
            check_optimizer(
                setup,
                contents,
                contents.get(PARTS),
                schema,
            )

        if is_damaged():
            continue

        _restore(setup, contents, path)
        notes = [f"{reason}; training goes on from that of step {step}." for reason in damaged]
        notes += _changed_settings(setup, label)

        return Loaded(
            step,
            contents["data"],
            tuple(notes),
        )

    if damaged:
        raise InputError(
            f"no checkpoint in {directory} can be read: {damaged[0]}.",
            _ANEW,
        )

    raise InputError(
        f"there is no checkpoint to resume in {directory}.",
        "Leave out resume, or check the directory.",
    )


def _leave_to_stages(setup: Setup, contents: Contents) -> None:
    """Drop what other stages of a pipeline read of a checkpoint of the whole model."""
    part = setup.part
    if part is None:
        return

    own = {name for name, _ in setup.trainable()}
    others = {name for name in part.names if name not in own}
    for kind in (WEIGHTS, PARTS):
        tensors = contents.get(kind, {})
        for path in list(tensors):
            if sharded_state.weight_of(path) in others:
                del tensors[path]

    held = {name for name, _ in setup.model.named_buffers()}
    buffers = contents[BUFFERS]
    for name in list(buffers):
        if name in part.buffers and name not in held:
            del buffers[name]

    numbers = contents.get("optimizer_numbers")
    if isinstance(numbers, dict):
        contents["optimizer_numbers"] = {
            name: entry for name, entry in numbers.items() if name not in others
        }


def state_of(setup: Setup) -> dict[str, Any]:
    """What training changes, in memory of its own; where several ranks train, this one's part."""
    weights = {}
    for name, value in setup.trained_values():
        weights[name] = value.detach().clone()

    buffers = {}
    for name, buffer in setup.model.named_buffers():
        buffers[name] = buffer.detach().clone()

    return {
        "weights": weights,
        "buffers": buffers,
        "optimizer": copy.deepcopy(setup.optimizer.state_dict()),
        "scaler": setup.scaler.state_dict() if setup.scaler else None,
        "skipped_updates": setup.progress.skipped_updates,
        "random": random_state.capture(setup.device),
    }


@torch.no_grad()
def restore_state(setup: Setup, state: Mapping[str, Any]) -> None:
    """Load what `state_of` gave for the same model and config; raises InputError for another's."""
    weights = dict(setup.trained_values())
    differing = weights.keys() ^ state["weights"].keys()
    if differing:
        message = f"the state is of another model or config: {min(differing)} is in only one."
        raise InputError(message, "Give the model and config it was made with.")

    for name, value in weights.items():
        value.copy_(state["weights"][name])

    setup.optimizer.load_state_dict(state["optimizer"])
    _restore_buffers(setup, state["buffers"])
    if setup.scaler and state["scaler"]:
        setup.scaler.load_state_dict(state["scaler"])

    setup.progress.skipped_updates = state["skipped_updates"]
    random_state.restore(state["random"], setup.device)


@contextmanager
def _damage_noted(ranks: Ranks, step: int, damaged: list[str]) -> Iterator[Callable[[], bool]]:
    """Add a sentence where what is done inside finds damage, on any rank.

    Yields a function that tells afterwards whether there was any.
    """
    before = len(damaged)
    damage: DamagedError | None = None
    try:
        yield lambda: len(damaged) > before
    except DamagedError as error:
        damage = error

    (is_damaged,) = ranks.largest(float(damage is not None))
    if is_damaged:
        reason = damage or "as another rank sees"
        damaged.append(f"the checkpoint of step {step} is damaged ({reason})")


@torch.no_grad()
def _restore(setup: Setup, contents: Contents, path: Path) -> None:
    """Load everything into the setup; the learning rate and weight decay are this run's own."""
    # not every optimizer has one
    decays = [group.get("weight_decay") for group in setup.optimizer.param_groups]

    if PARTS in contents:
        sharded_state.restore(
            setup,
            contents[PARTS],
            contents,
            path,
        )
    else:
        for name, value in setup.trained_values():
            value.copy_(sharded_state.shard_of(contents[WEIGHTS][name], value))
        if setup.ranks.are_several:
            sharded_state.divide_optimizer(setup, contents)
        else:
            refusal = "the optimizer does not take its saved state"
            with as_input_error(lambda error: f"{refusal}: {describe_error(error)}.", _ANEW):
                setup.optimizer.load_state_dict(contents["optimizer"])

    for group, decay in zip(setup.optimizer.param_groups, decays, strict=True):
        if decay is not None:
            group["weight_decay"] = decay

    _restore_buffers(setup, contents[BUFFERS])
    if setup.scaler and contents["scaler"]:
        setup.scaler.load_state_dict(contents["scaler"])

    # an earlier autofit wrote none
    setup.progress.skipped_updates = contents.get("skipped_updates", 0)
    random_state.restore(contents["random"], setup.device)


def _restore_buffers(setup: Setup, saved: Tensors) -> None:
    """Load the model's buffers, also those of another shape than it has now."""
    for name, values in saved.items():
        parent, _, own_name = name.rpartition(".")
        buffers = setup.model.get_submodule(parent)._buffers

        buffer = buffers.get(own_name)
        if buffer is not None and buffer.shape == values.shape:
            buffer.copy_(values)
        else:  # one that the model makes or replaces while it runs
            buffers[own_name] = values.to(setup.device)


def _check_agreement(path: Path, differences: list[str]) -> None:
    """Raise an InputError that names the first differences, if there are any."""
    if not differences:
        return

    named = "; ".join(differences[:_MOST_DIFFERENCES])
    more = len(differences) - _MOST_DIFFERENCES
    if more > 0:
        named += f" (and {more} more)"

    raise InputError(
        f"the checkpoint {path} is of another model or config: {named}.",
        "Give the model and config it was made with.",
    )


def _config_differences(setup: Setup, label: Label) -> list[str]:
    """The knobs by which the two would learn differently, or lay out optimizer state
    differently."""
    config = setup.config
    workload = setup.workload
    # What rests on the host is stepped by an optimizer of its own.
    is_stepped_apart = updated_on(config) == "host" and config.optimizer_offload == "cpu"

    differences = []
    for technique in all_techniques():
        knob = technique.name
        mine = config.get(knob, technique.off)
        theirs = label["config"].get(knob, technique.off)
        if mine == theirs or knob == "micro_batch_size":  # any split of a batch learns the same
            continue

        lays_out_state = technique.record.lays_out_state
        if knob == "parameter_offload" and is_stepped_apart:
            lays_out_state = True

        learns_the_same = technique.exact(mine, workload) and technique.exact(theirs, workload)

        if lays_out_state or not learns_the_same:
            differences.append(f"{knob} {_word(mine)}, checkpoint has {_word(theirs)}")

    return differences


def _weight_differences(setup: Setup, label: Label, saved: Tensors) -> list[str]:
    """The weights that only one of the two trains, or of another shape; else the frozen ones."""
    theirs = {}
    for name, tensor in saved.items():
        if not sharded_state.is_of_optimizer(name):
            theirs[name] = list(tensor.shape)

    reshaped = []
    missing = []
    for name, parameter in setup.trainable():
        shape = list(parameter.shape)
        found = theirs.pop(name, None)
        if found is None:
            missing.append(f"weight {name} is trained, checkpoint has none")
        elif found != shape:
            reshaped.append(f"weight {name} {shape}, checkpoint has {found}")

    differences = reshaped + missing
    differences += [f"weight {name} is not trained, checkpoint has one" for name in theirs]
    if not differences and label.get("frozen_weights") != frozen_digest(setup):
        return ["the frozen weights are not those that it was trained beside"]

    return differences


def _changed_settings(setup: Setup, label: Label) -> list[str]:
    """A sentence for each hyperparameter that differs from the checkpoint's."""
    mine = asdict(setup.hyperparameters)
    mine["effective_batch_size"] = setup.workload.effective_batch_size

    theirs = dict(label["hyperparameters"])
    theirs["effective_batch_size"] = label.get("effective_batch_size")

    notes = []
    for name, now in mine.items():
        if name in theirs and theirs[name] != now:
            before = _word(theirs[name])
            notes.append(f"{name} is {_word(now)} from here on, before it was {before}.")

    return notes


def _word(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, str):
        return value
    return json.dumps(value)
