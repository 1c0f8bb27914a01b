"""Checkpoints whose checksums are right and whose contents are not of this model: the one before them is taken."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from autofit.core import strict_yaml
from autofit.core.errors import InputError
from autofit.core.files import checksum
from autofit.setup import Setup
from autofit.training import checkpoint, checkpoint_files, json_state
from autofit.training.build import build
from autofit.training.epochs import Epochs
from autofit.training.step import train_step
from tests import tiny

Change = Callable[[Any], Any]
BATCH = tiny.conv_workload(4).batch(4)
EACH = "optimizer_in_backward"


def run(config: dict[str, Any] | None = None) -> Setup:
    torch.manual_seed(0)
    setup = build(tiny.conv_workload(4), config or {}, tiny.CPU, model=tiny.ConvNet())
    with torch.compiler.set_stance("force_eager"):
        train_step(setup, BATCH)
    return setup


def save(setup: Setup, folder: Path, step: int) -> Path:
    place = Epochs([BATCH], 0, batch_size=4)
    next(place)
    place.done(4)
    return checkpoint.save(setup, folder, step, data_state=json_state.encoded(place.state()))


def forged(path: Path, name: str, change: Change) -> None:
    """Change what a file holds, and sign it as a training would have."""
    file = path / name
    if name == "checkpoint.yaml":
        label = strict_yaml.load_mapping(file)
        del label["label_crc32"]
        file.write_text(checkpoint_files.signed(strict_yaml.dump(changed(label, change))))
        return
    if name == "state.json":
        state = json_state.loads(file.read_text())
        data = changed(state, change)
        file.write_text(json.dumps(json_state.encoded(data)))
    elif file.suffix == ".safetensors":
        safetensors.torch.save_file(changed(safetensors.torch.load_file(file), change), file)
    else:
        torch.save(changed(torch.load(file, weights_only=True), change), file)
    resign(path, name)


def resign(path: Path, name: str) -> None:
    """Give a checkpoint the checksum of a changed file."""
    forged(
        path, "checkpoint.yaml", lambda label: label["crc32"].update({name: checksum(path / name)})
    )


def changed(content: Any, change: Change) -> Any:
    """What a function makes of it, or makes it into."""
    answer = change(content)
    return content if answer is None else answer


def entry(state: Any, key: str, value: Any) -> None:
    state["state"][0][key] = value


OF_OPTIMIZER: dict[str, Change] = {
    "one element": lambda state: entry(state, "exp_avg", torch.zeros(1)),
    "one row": lambda state: entry(state, "exp_avg", torch.zeros(1, 3, 3, 3)),
    "other numbers": lambda state: entry(
        state, "exp_avg_sq", torch.zeros(16, 3, 3, 3, dtype=torch.int64)
    ),
    "sparse": lambda state: entry(state, "exp_avg", torch.zeros(16, 3, 3, 3).to_sparse()),
    "wider numbers": lambda state: entry(
        state, "exp_avg", torch.zeros(16, 3, 3, 3, dtype=torch.float64)
    ),
    "no tensor": lambda state: entry(state, "exp_avg", 0.5),
    "a step of three": lambda state: entry(state, "step", torch.zeros(3)),
    "one more": lambda state: entry(state, "max_exp_avg_sq", torch.zeros(2)),
    "one less": lambda state: state["state"].update({0: {"step": torch.zeros(())}}),
    "no entry": lambda state: state["state"].update({0: [1]}),
    "another weight": lambda state: state["state"].update({999: {}}),
    "empty": lambda state: {},
    "a list": lambda state: [state],
    "no groups": lambda state: {**state, "param_groups": []},
    "short groups": lambda state: state["param_groups"][0]["params"].pop() and None,
    "no state": lambda state: {**state, "state": None},
}
OF_STATE: dict[str, Change] = {
    "empty": lambda state: {},
    "a list": lambda state: [1],
    "no random state": lambda state: {**state, "random": None},
    "an empty one": lambda state: {**state, "random": {}},
    "a short one": lambda state: state["random"].update(torch=torch.zeros(3, dtype=torch.uint8)),
    "behind numpy's numbers": lambda state: state["random"]["numpy"]["state"].update(pos=2**30),
    "before them": lambda state: state["random"]["numpy"]["state"].update(pos=-5),
    "of Python's": lambda state: state["random"].update(python=(3, (1, 2), None)),
    "no ranks": lambda state: {**state, "ranks": 0},
    "other names": lambda state: {**state, "names": list(reversed(state["names"]))},
    "skipped": lambda state: {**state, "skipped_updates": "many"},
    "a huge place": lambda state: state["data"].update(samples=2**62, given=2**62),
    "endless passes": lambda state: state["data"].update(passes=10**15),
    "a place of words": lambda state: state["data"].update(samples="4"),
    "no place": lambda state: {**state, "data": 7},
}
OF_TENSORS: dict[str, tuple[str, Change]] = {
    "weights": (
        "weights.safetensors",
        lambda found: {name: each.to(torch.int64) for name, each in found.items()},
    ),
    "buffers": (
        "buffers.safetensors",
        lambda found: {name: each.bool() for name, each in found.items()},
    ),
    "shapes": ("buffers.safetensors", lambda found: {name: torch.zeros(7) for name in found}),
    "names": ("buffers.safetensors", lambda found: {**found, "nowhere.at_all": torch.zeros(1)}),
    "hidden": ("buffers.safetensors", lambda found: {**found, "stem.weight": torch.zeros(1)}),
}
OF_LABEL: dict[str, Change] = {
    "no ranks": lambda label: {**label, "ranks": 0},
    "ranks of words": lambda label: {**label, "ranks": "two"},
    "other ranks": lambda label: {**label, "ranks": 3},
    "nested config": lambda label: {**label, "config": {"optimizer": ["adamw"]}},
    "step": lambda label: {**label, "next_step": -2},
    "sums": lambda label: {**label, "crc32": ["weights.safetensors"]},
    "files elsewhere": lambda label: label["crc32"].update({"../../secret": 1}),
    "no optimizer": lambda label: label["crc32"].pop("optimizer.pt") and None,
    "no weights": lambda label: label["crc32"].pop("weights.safetensors") and None,
}
CASES = [(name, "optimizer.pt", change) for name, change in OF_OPTIMIZER.items()]
CASES += [(name, "state.json", change) for name, change in OF_STATE.items()]
CASES += [(name, file, change) for name, (file, change) in OF_TENSORS.items()]
CASES += [(name, "checkpoint.yaml", change) for name, change in OF_LABEL.items()]


@pytest.mark.parametrize(
    ("file", "change"), [case[1:] for case in CASES], ids=[f"{c[1]}-{c[0]}" for c in CASES]
)
def test_what_is_signed_and_of_no_training_is_damaged(
    tmp_path: Path, file: str, change: Change
) -> None:
    setup = run()
    save(setup, tmp_path, 1)
    train_step(setup, BATCH)
    forged(save(setup, tmp_path, 2), file, change)
    again = run()
    loaded = checkpoint.load(again, tmp_path)
    assert loaded.next_step == 1
    assert "the checkpoint of step 2 is damaged (" in loaded.notes[0]
    train_step(again, BATCH)  # which crashes where state of another shape was loaded
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(*map(values, (again, setup)), strict=True)
    )


def values(setup: Setup) -> list[torch.Tensor]:
    return list(setup.model.state_dict().values())


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": "adamw-8bit"},
        {"optimizer": "lion-8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "adamw-4bit"},
        {"optimizer": "adamw-master", "precision": "bf16"},
        {"optimizer": "adamw-8bit-sr", "precision": "bf16"},
        {EACH: True},
    ],
    ids=str,
)
def test_state_of_every_optimizer_is_of_its_own_form(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    setup = run(config)
    save(setup, tmp_path, 1)

    def cut(state: Any) -> None:
        """Leave one element of what there is most of."""
        first = state["each"][0] if EACH in config else state
        entries = first["state"][0]
        entries = entries.get("__bnb_optimizer_quant_state__", entries)
        largest = max(
            entries,
            key=lambda key: entries[key].numel() if isinstance(entries[key], torch.Tensor) else 0,
        )
        entries[largest] = torch.zeros(1, dtype=entries[largest].dtype)

    forged(save(setup, tmp_path, 2), "optimizer.pt", cut)
    again = run(config)
    assert checkpoint.load(again, tmp_path).next_step == 1
    # nothing is wrong with that one
    forged(save(setup, tmp_path, 3), "optimizer.pt", lambda state: None)
    assert checkpoint.load(again, tmp_path).next_step == 3


def test_state_lies_in_memory_as_the_weight_does(tmp_path: Path) -> None:
    """A tensor of the right shape may have one element, which is not all that a kernel writes to."""
    setup = run()
    moment = setup.optimizer.state[setup.model.stem.weight]["exp_avg"].clone()
    for step, made in (
        (1, lambda: torch.zeros(1).expand(moment.shape)),
        (2, lambda: moment.mT.contiguous().mT),
    ):
        forged(
            save(setup, tmp_path, step),
            "optimizer.pt",
            lambda state, made=made: entry(state, "exp_avg", made()),
        )
        checkpoint.load(setup, tmp_path)
        loaded = setup.optimizer.state[setup.model.stem.weight]["exp_avg"]
        assert loaded.stride() == moment.stride()
        assert loaded.untyped_storage().nbytes() == moment.untyped_storage().nbytes()
        assert torch.equal(loaded, made())


def with_optimizer(function: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> Setup:
    torch.manual_seed(0)
    workload = replace(tiny.conv_workload(4), optimizer=function)
    return build(workload, {}, tiny.CPU, model=tiny.ConvNet())


class Counting(torch.optim.SGD):
    """Keeps state in its groups, and more of it as training goes on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for weight in group["params"]:
                self.state[weight].setdefault("losses", []).append(float(group["count"]))
                if group["count"] > 1:
                    self.state[weight]["late"] = torch.zeros(group["count"])


def test_an_optimizer_of_the_users_may_hold_what_it_likes(tmp_path: Path) -> None:
    setups = [
        with_optimizer(lambda groups: Counting(groups, lr=0.1, momentum=0.9)) for _ in range(2)
    ]
    for _ in range(3):
        train_step(setups[0], BATCH)
    save(setups[0], tmp_path, 3)
    assert checkpoint.load(setups[1], tmp_path).notes == ()
    assert setups[1].optimizer.param_groups[0]["count"] == 3
    assert next(iter(setups[1].optimizer.state.values()))["losses"] == [1.0, 2.0, 3.0]
    for setup in setups:
        train_step(setup, BATCH)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*map(values, setups), strict=True))

    forged(
        save(setups[0], tmp_path, 4),
        "optimizer.pt",
        lambda state: entry(state, "momentum_buffer", torch.zeros(1)),
    )
    assert checkpoint.load(setups[1], tmp_path).next_step == 3


class Refusing(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise RuntimeError("not mine")


def test_an_optimizer_of_the_users_that_refuses_its_state(tmp_path: Path) -> None:
    setup = with_optimizer(lambda groups: Refusing(groups, lr=0.1))
    save(setup, tmp_path, 1)
    with pytest.raises(
        InputError, match=r"does not take its saved state: RuntimeError: not mine\. Train again"
    ):
        checkpoint.load(setup, tmp_path)


def test_a_frozen_model_needs_no_state_of_all(tmp_path: Path) -> None:
    """A weight that no loss reaches has none, and is stepped nevertheless by what tells the form."""
    torch.manual_seed(0)
    model = tiny.ConvNet()
    model.unused = nn.Parameter(torch.ones(5))
    setup = build(tiny.conv_workload(4), {}, tiny.CPU, model=model)
    train_step(setup, BATCH)
    save(setup, tmp_path, 1)
    assert checkpoint.load(setup, tmp_path).notes == ()
    assert model.unused not in setup.optimizer.state
    assert torch.equal(model.unused, torch.ones(5))
