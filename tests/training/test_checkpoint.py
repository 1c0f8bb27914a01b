"""Checkpoints bring a run exactly to where it stood, and are refused where they do not belong."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from autofit.core.errors import InputError
from autofit.core.files import checksum
from autofit.core.workload import Hyperparameters, Workload
from autofit.setup import Setup
from autofit.training import atomic_writes, checkpoint, checkpoint_files, json_state
from autofit.training.build import build
from autofit.training.loop import StepReport, train
from autofit.training.step import train_step
from tests import tiny

BATCHES = [
    tuple(tensor[:4] for tensor in tiny.conv_workload().batch(4 + step)) for step in range(4)
]
FILES = (
    "buffers.safetensors",
    "checkpoint.yaml",
    "optimizer.pt",
    "state.json",
    "weights.safetensors",
)


def run(config: dict[str, Any], **hyperparameters: Any) -> Setup:
    """A run with dropout and BatchNorm, so that random numbers and buffers matter."""
    torch.manual_seed(0)
    chosen = Hyperparameters(**{"lr": 1e-2, "schedule": "cosine", **hyperparameters})
    model = nn.Sequential(tiny.ConvNet(), nn.Dropout(0.2))
    return build(tiny.conv_workload(4), config, tiny.CPU, model=model, hyperparameters=chosen)


def weights(setup: Setup) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def steps(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / checkpoint_files.FOLDER).iterdir())


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": "adamw-8bit"},
        {"optimizer": "sgd", "precision": "bf16"},
        {"optimizer": "adafactor"},
        {"optimizer": "adamw-8bit", "optimizer_in_backward": True},
        {"lora_rank": 2, "precision": "fp16-mixed"},
    ],
    ids=str,
)
def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    whole = run(config)

    def save_in_the_middle(report: StepReport) -> None:
        if report.step == 2:
            checkpoint.save(whole, tmp_path, 2)

    reports = train(whole, BATCHES, steps=4, callbacks=[save_in_the_middle])
    second = run(config)
    train_step(second, BATCHES[3])  # all that a checkpoint holds is another now
    loaded = checkpoint.load(second, tmp_path)
    assert loaded == checkpoint.Loaded(2, None, ())
    assert train(second, BATCHES[2:], steps=4, first_step=2) == reports[2:]
    assert_same(weights(second), weights(whole))


@pytest.mark.parametrize("value", ["adamw-4bit", "adamw-fp8"])
# torchao compiles its update, which takes 20 s and changes no state's class
@torch.compiler.set_stance("force_eager")
def test_tensors_of_torchaos_own_kind(tmp_path: Path, value: str) -> None:
    setups = [
        build(
            tiny.llama_workload(),
            {"optimizer": value},
            tiny.CPU,
            hyperparameters=Hyperparameters(lr=1e-2),
        )
        for _ in range(2)
    ]
    batch = tiny.llama_workload().batch(4)
    for _ in range(2):
        train_step(setups[0], batch)
    checkpoint.save(setups[0], tmp_path, 2)
    checkpoint.load(setups[1], tmp_path)
    assert train_step(setups[0], batch) == train_step(setups[1], batch)
    assert_same(*map(weights, setups))


def test_all_random_numbers_come_back(tmp_path: Path) -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    setup = run({})
    checkpoint.save(setup, tmp_path, 1)
    first = drawn()
    assert drawn() != first
    checkpoint.load(setup, tmp_path)
    assert drawn() == first


class Odd(nn.Module):
    """Weights and buffers of every kind that is hard to write down."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(8, 6)
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.strided = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.upper, self.lower = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])
        self.same = nn.Parameter(torch.randn(4))
        self.tied = self.same
        self.alias = nn.Parameter(self.same.data)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(4, 6).tril().bool())
        self.register_buffer(
            "rotary", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False
        )
        self.register_buffer("view", self.mask[1:3])
        self.register_buffer("nothing", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.short *= 1.5
        self.seen = torch.cat([self.seen, torch.ones(1)])  # a buffer that grows
        self.nothing = self.seen * 2  # and one that comes into being
        rows = (
            (self.transposed + self.upper.t()[:4, :4].sum() + self.lower) * self.mask * self.scale
        )
        return (rows.sum(1) + self.same + self.alias + self.tied).square().mean() * x.mean()


def test_tensors_that_are_hard_to_write_down(tmp_path: Path) -> None:
    workload = Workload(model=Odd, batch=lambda n: torch.ones(n, 2), effective_batch_size=4)

    def made(seed: int) -> Setup:
        torch.manual_seed(seed)
        return build(
            workload,
            {"optimizer": "sgd"},
            tiny.CPU,
            model=Odd(),
            hyperparameters=Hyperparameters(lr=0.1),
        )

    first, second = made(0), made(1)
    for _ in range(2):
        train_step(first, workload.batch(4))
    checkpoint.save(first, tmp_path, 2)
    layouts = {name: parameter.stride() for name, parameter in second.model.named_parameters()}
    checkpoint.load(second, tmp_path)
    assert_same(weights(second), weights(first))
    assert_same(*(dict(setup.model.named_buffers()) for setup in (second, first)))
    assert second.model.count == 2
    assert second.model.tied is second.model.same
    assert {
        name: parameter.stride() for name, parameter in second.model.named_parameters()
    } == layouts
    assert train_step(first, workload.batch(4)) == train_step(second, workload.batch(4))


def test_a_number_that_safetensors_does_not_know(tmp_path: Path) -> None:
    setup = run({})
    setup.model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(
        InputError,
        match=r"wide is of complex128, which safetensors cannot hold\. Make it complex64",
    ):
        checkpoint.save(setup, tmp_path, 1)
    assert not checkpoint.exists(tmp_path)


# What lies there.


def test_a_directory_for_each_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    setup = run({})
    out = tmp_path / "new"
    assert not checkpoint.exists(out)
    for step in (200, 400, 600):
        path = checkpoint.save(setup, out, step)
        assert path == out / "checkpoints" / f"step-{step:08d}"
        assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert checkpoint.exists(out)
    assert steps(out) == ["step-00000400", "step-00000600"]
    checkpoint.save(setup, out, 800, keep_last=3)
    assert steps(out) == ["step-00000400", "step-00000600", "step-00000800"]
    checkpoint.save(setup, out, 123456789, keep_last=1)
    assert steps(out) == ["step-123456789"]
    assert checkpoint.load(setup, out).next_step == 123456789


def test_the_label_is_for_people(tmp_path: Path) -> None:
    label = yaml.safe_load(
        (checkpoint.save(run({"micro_batch_size": 2}), tmp_path, 7) / "checkpoint.yaml").read_text()
    )
    assert label["next_step"] == 7
    assert label["model"] == "conv"
    assert label["config"]["micro_batch_size"] == 2
    assert label["hyperparameters"]["schedule"] == "cosine"
    assert label["crc32"].keys() == set(FILES) - {"checkpoint.yaml"}


def test_no_file_can_run_code(tmp_path: Path) -> None:
    """Python's pickle would: what is loaded names nothing but tensors and plain containers."""
    data_state = json_state.encoded({"place": [1, (2, "three")], "order": torch.arange(3)})
    path = checkpoint.save(run({}), tmp_path, 1, data_state=data_state)
    assert json.loads((path / "state.json").read_text())["data"]["place"] == [
        1,
        {"tuple": [2, "three"]},
    ]
    assert not torch.serialization.get_unsafe_globals_in_checkpoint(path / "optimizer.pt")
    loaded = checkpoint.load(run({}), tmp_path)
    assert loaded.data_state["place"] == [1, (2, "three")]
    assert torch.equal(loaded.data_state["order"], torch.arange(3))


def unsigned(label: Path) -> str:
    """A label without its own checksum, as earlier formats are."""
    return label.read_text().partition("label_crc32")[0]


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_code_that_somebody_put_into_one_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checksums that belong to it."""
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(run({}), tmp_path, 1)
    before = checksum(path / "optimizer.pt")
    torch.save(Harmful(), path / "optimizer.pt")
    label, after = unsigned(path / "checkpoint.yaml"), checksum(path / "optimizer.pt")
    (path / "checkpoint.yaml").write_text(
        checkpoint_files.signed(label.replace(str(before), str(after)))
    )
    with pytest.raises(InputError, match=r"optimizer\.pt cannot be read \(UnpicklingError\)"):
        checkpoint.load(run({}), tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True, None])
def test_how_many_are_kept(tmp_path: Path, keep_last: Any) -> None:
    with pytest.raises(InputError, match=r"keep_last must be a whole number from 1, not"):
        checkpoint.save(run({}), tmp_path, 1, keep_last=keep_last)


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    setup = run({})
    checkpoint.save(setup, tmp_path, 2)
    train_step(setup, BATCHES[0])
    checkpoint.save(setup, tmp_path, 2, keep_last=1)
    assert steps(tmp_path) == ["step-00000002"]
    again = run({})
    checkpoint.load(again, tmp_path)
    assert_same(weights(again), weights(setup))


# What it must agree on.


@pytest.mark.parametrize(
    "knobs",
    [
        {"micro_batch_size": 2},
        {"activation_checkpointing": "full"},
        {"micro_batch_size": 1, "activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_how_a_batch_is_cut_and_what_is_kept_of_it_may_be_another(
    tmp_path: Path, knobs: dict[str, Any]
) -> None:
    checkpoint.save(run({"micro_batch_size": 4}), tmp_path, 1)
    assert checkpoint.load(run(knobs), tmp_path) == checkpoint.Loaded(1)


@pytest.mark.parametrize(
    ("config", "differs"),
    [
        ({"lora_rank": 4}, "lora_rank 4, checkpoint has 2"),
        ({"lora_rank": 2, "optimizer": "adamw-8bit"}, "optimizer adamw-8bit, checkpoint has adamw"),
        (
            {"lora_rank": 2, "optimizer_in_backward": True},
            "optimizer_in_backward true, checkpoint has false",
        ),
        ({"lora_rank": 2, "lora_alpha": 64}, "lora_alpha 64, checkpoint has null"),
        ({"lora_rank": 2, "quantization": "nf4"}, "quantization nf4, checkpoint has none"),
        ({"lora_rank": 2, "precision": "bf16"}, "precision bf16, checkpoint has fp32"),
        (
            {"lora_rank": 2, "precision": "bf16", "optimizer": "sgd"},
            "precision bf16, checkpoint has fp32; optimizer sgd, ",
        ),
        ({}, "lora_rank 0, checkpoint has 2; lora_targets null, checkpoint has all-linear"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_config_is_refused(
    tmp_path: Path, config: dict[str, Any], differs: str
) -> None:
    checkpoint.save(run({"lora_rank": 2}), tmp_path, 1)
    other = run(config)
    before = weights(other)
    with pytest.raises(
        InputError,
        match=rf"is of another model or config: .*{differs}.*\. Give the model and config",
    ):
        checkpoint.load(other, tmp_path)
    assert_same(weights(other), before)


def other_model(model: nn.Module) -> Setup:
    return build(tiny.conv_workload(4), {}, tiny.CPU, model=model)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny.ConvNet()
    model.stem.weight.requires_grad_(False)
    checkpoint.save(other_model(model), tmp_path, 1)
    cases = {
        r"weight stem\.bias \[8\], checkpoint has \[16\].* \(and \d+ more\)\.": tiny.ConvNet(
            width=8
        ),
        r"weight blocks\.3\.conv\.weight is trained, checkpoint has none": tiny.ConvNet(depth=4),
        r"weight blocks\.2\.conv\.weight is not trained, checkpoint has one": tiny.ConvNet(depth=2),
        r"the frozen weights are not those that it was trained beside\.": tiny.ConvNet(),
    }
    for words, other in cases.items():
        other.stem.weight.requires_grad_(False)
        with pytest.raises(InputError, match=words):
            checkpoint.load(other_model(other), tmp_path)


def test_what_is_learned_by_may_be_told_anew(tmp_path: Path) -> None:
    setup = run({}, weight_decay=0.1)
    train_step(setup, BATCHES[0])
    checkpoint.save(setup, tmp_path, 1)
    second = run({}, weight_decay=0.2, lr=1e-3)
    assert checkpoint.load(second, tmp_path).notes == (
        "lr is 0.001 from here on, before it was 0.01.",
        "weight_decay is 0.2 from here on, before it was 0.1.",
    )
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.2, 0.0]


# What is damaged.


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def flip_first(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in FILES for damage in (cut, Path.unlink, flip, flip_first)]
    + [("checkpoint.yaml", pipe), ("state.json", pipe)],
)
def test_where_the_newest_is_damaged_the_one_before_it_is_taken(
    tmp_path: Path, name: str, damage: Any
) -> None:
    setup = run({})
    checkpoint.save(setup, tmp_path, 1)
    kept = weights(setup)
    train_step(setup, BATCHES[0])
    damage(checkpoint.save(setup, tmp_path, 2) / name)
    loaded = checkpoint.load(setup, tmp_path)
    assert loaded.next_step == 1
    assert_same(weights(setup), kept)
    assert len(loaded.notes) == 1
    assert loaded.notes[0].startswith(f"the checkpoint of step 2 is damaged ({name} ")
    assert loaded.notes[0].endswith("; training goes on from that of step 1.")
    # The run reaches a step before that of the damaged one, which does not stand for the newest from then on.
    checkpoint.save(setup, tmp_path, 1, keep_last=1)
    assert steps(tmp_path) == ["step-00000001"]


def test_all_of_them_are_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(checkpoint.save(run({}), tmp_path, step) / "weights.safetensors")
    words = r"no checkpoint in .* can be read: the checkpoint of step 2 is damaged \(weights\.safetensors is not what"
    with pytest.raises(InputError, match=words + r" was written\)\. Train again without resume\."):
        checkpoint.load(run({}), tmp_path)


def test_one_of_another_format(tmp_path: Path) -> None:
    path = checkpoint.save(run({}), tmp_path, 1) / "checkpoint.yaml"
    path.write_text(unsigned(path).replace("autofit_checkpoint: 3", "autofit_checkpoint: 2"))
    with pytest.raises(
        InputError, match=r"is of format 2, this autofit reads 3\. Resume it with the autofit that"
    ):
        checkpoint.load(run({}), tmp_path)


def test_a_directory_without_one(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"there is no checkpoint to resume in .*\. Leave out resume"
    ):
        checkpoint.load(run({}), tmp_path)


def test_what_a_crash_left_is_never_loaded_and_goes_with_the_next_save(tmp_path: Path) -> None:
    setup = run({})
    path = checkpoint.save(setup, tmp_path, 1)
    shutil.copytree(path, path.with_name(".step-00000002.part"))
    assert checkpoint.load(setup, tmp_path).next_step == 1
    path.rename(path.with_name(".step-00000001.former"))  # between the two renames of a replacement
    assert checkpoint.exists(tmp_path)
    assert checkpoint.load(setup, tmp_path).next_step == 1
    checkpoint.save(setup, tmp_path, 3)
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]


# A full disk.


def test_no_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = run({})
    checkpoint.save(setup, tmp_path, 1)
    monkeypatch.setattr(atomic_writes, "free_bytes", lambda _: 2**20)
    words = r"there is no room for the checkpoint of step 2 in .*: it needs 0\.00\d+ GiB, and 0\.000977 GiB is free\."
    with pytest.raises(InputError, match=words + " Make room there"):
        checkpoint.save(setup, tmp_path, 2)
    assert steps(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    "config", [{}, {"optimizer": "adamw-8bit"}, {"precision": "bf16"}], ids=str
)
def test_the_room_that_is_asked_for_is_what_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    asked: list[int] = []
    atomic_directory = atomic_writes.atomic_directory

    def recorded(path: Path, *, what: str, needed_bytes: int) -> Any:
        asked.append(needed_bytes)
        return atomic_directory(path, what=what, needed_bytes=needed_bytes)

    monkeypatch.setattr(atomic_writes, "atomic_directory", recorded)
    setup = run(config)
    train_step(setup, BATCHES[0])
    taken = sum(file.stat().st_size for file in checkpoint.save(setup, tmp_path, 1).iterdir())
    assert taken <= asked[0] <= taken + 2**20


def test_one_of_another_step_than_its_name_says(tmp_path: Path) -> None:
    checkpoint.save(run({}), tmp_path, 3).rename(
        tmp_path / checkpoint_files.FOLDER / "step-00000005"
    )
    with pytest.raises(
        InputError,
        match=r"checkpoint of step 5 is damaged \(checkpoint.yaml is not what was written",
    ):
        checkpoint.load(run({}), tmp_path)


@pytest.mark.parametrize("kind", ["link to nothing", "link to a folder", "file"])
def test_what_lies_where_a_checkpoint_is_to_be_makes_way(tmp_path: Path, kind: str) -> None:
    setup = run({})
    elsewhere = tmp_path / "elsewhere"
    places = [tmp_path / checkpoint_files.FOLDER / f"step-{step:08d}" for step in (1, 2, 9)]
    places[0].parent.mkdir()
    if kind == "link to a folder":
        elsewhere.mkdir()
        (elsewhere / "mine").touch()
    for place in places:
        if kind == "file":
            place.touch()
        else:
            place.symlink_to(elsewhere)
    with pytest.raises(InputError, match="the checkpoint of step 9 is damaged"):
        checkpoint.load(setup, tmp_path)
    checkpoint.save(setup, tmp_path, 1)
    checkpoint.save(setup, tmp_path, 2, keep_last=1)
    assert checkpoint.load(setup, tmp_path) == checkpoint.Loaded(2)
    assert sorted(each.name for each in places[0].parent.iterdir()) == ["step-00000002"]
    assert not places[1].is_symlink()
    assert kind != "link to a folder" or (elsewhere / "mine").exists()
