"""Every example runs, and what it shows is so."""

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch

import autofit
from autofit import techniques
from autofit.cli import main as command_line
from autofit.report import formatting
from autofit.training.build import build
from autofit.training.step import accumulate
from tests import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = (
    *("causal_lm", "classifier", "convnet", "encoder", "estimate", "hf_trainer"),
    *("own_loop", "own_task", "own_technique", "several_gpus", "with_accelerate", "with_lightning"),
)
Example = Callable[[str], ModuleType]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """Imports an example afresh. Run directories go to the test's folder; knobs an example adds are gone after it.

    It is sent to probes by value: the zygote that the tests share knows no examples.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(techniques, "_registry", dict(techniques._registry))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def fresh(name: str) -> ModuleType:
        module = importlib.import_module(name)
        cloudpickle.register_pickle_by_value(module)
        return module

    yield fresh
    for name in cloudpickle.list_registry_pickle_by_value() & set(NAMES):
        cloudpickle.unregister_pickle_by_value(sys.modules[name])


def losses(trained: autofit.Trained) -> tuple[float, float]:
    """The mean loss of the first and of the last five steps."""
    values = [report.loss for report in trained.history]
    return sum(values[:5]) / 5, sum(values[-5:]) / 5


def test_a_task_of_ones_own_learns_in_micro_batches(example: Example) -> None:
    first, last = losses(example("own_task").main())
    assert last < 0.5 * first


def test_all_of_them_are_tested_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NAMES)


@pytest.mark.usefixtures("shared_zygote")
def test_a_causal_language_model_learns_to_spell(example: Example) -> None:
    trained = example("causal_lm").main(steps=25, trials=1)
    first, last = losses(trained)
    assert last < 0.7 * first
    best = trained.result.best
    assert best.verified
    assert best.peak_bytes.allocated <= trained.result.budget.device_bytes
    assert best.config["precision"] in ("fp32", "bf16-mixed")
    assert best.config["micro_batch_size"] * best.config["gradient_accumulation_steps"] == 16
    assert best.tokens_per_second == pytest.approx(best.samples_per_second * 64)


@pytest.mark.usefixtures("shared_zygote")
def test_its_budget_rules_something_out(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    # what would help takes seconds to find out
    monkeypatch.setattr("autofit.tuning.annotations.Annotator.remedies", lambda *_: ())
    module = example("causal_lm")
    plain = {
        "micro_batch_size": 16,
        "precision": "fp32",
        "activation_checkpointing": "none",
        "lora_rank": 0,
        "quantization": "none",
        "optimizer": "adamw",
        "optimizer_in_backward": False,
        "attention": "sdpa",
        "loss": "standard",
    }
    loader = module.make_loader()
    result = autofit.search(
        module.make_model(), loader, device="cpu", mem=module.MEMORY_GIB, set=plain
    )
    assert result.best is None
    assert [trial.outcome.value for trial in result.trials] == ["out_of_memory"]


@pytest.mark.usefixtures("shared_zygote")
def test_a_plain_module_with_a_loss_of_its_own_learns(example: Example) -> None:
    trained, before, after = example("classifier").main(steps=60, trials=2)
    assert before < 0.3
    assert after > 0.6
    assert trained.result.best.config["precision"] == "fp32"
    assert trained.result.best.config["micro_batch_size"] in (32, 64, 128, 256)


def test_the_model_that_comes_back_is_the_one_that_was_given(example: Example) -> None:
    module = example("classifier")
    model = module.Classifier()
    weight = model.leave.weight
    before = weight.detach().clone()
    loader = torch.utils.data.DataLoader(module.make_data(64), batch_size=32)
    config = {"micro_batch_size": 8, "activation_checkpointing": "full"}
    trained = autofit.fit(
        model, loader, loss=module.loss, config=config, device="cpu", lr=1e-3, epochs=2
    )
    assert trained.model is model
    assert model.leave.weight is weight
    assert not torch.equal(weight, before)
    assert len(trained.history) == 4
    # given back without wrappers
    assert all("forward" not in block.__dict__ for block in model.blocks)


@pytest.mark.usefixtures("shared_zygote")
def test_a_convolutional_network_is_warned_of_what_micro_batches_do_to_batch_norm(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    result, trained = example("convnet").main(steps=25, trials=2)
    assert result.best.config["micro_batch_size"] < 64  # the whole batch does not fit
    assert (
        "warning: BatchNorm takes its statistics over micro-batches of" in capsys.readouterr().out
    )
    first, last = losses(trained)
    assert last < 0.7 * first


@pytest.mark.usefixtures("predicting_zygote")
def test_an_encoder_with_real_weights_learns_to_judge_within_a_budget_that_only_lora_fits(
    example: Example,
) -> None:
    trained, accuracies = example("encoder").main(epochs=6, trials=1)
    before, after = accuracies["known"]
    assert before < 0.8
    assert after > 0.9
    learned = {
        name for name, parameter in trained.model.named_parameters() if parameter.requires_grad
    }
    # the head is new: low-rank updates are not enough for it
    assert {"classifier.weight", "classifier.bias"} < learned
    assert all("lora_" in name or name.startswith("classifier") for name in learned)


def test_a_prediction_is_made_for_cards_that_are_not_here(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    found = example("estimate").main()
    assert list(found) == ["rtx-3060", "rtx-4090", "h100"]
    speeds = [estimate.tokens_per_second for estimate in found.values()]
    assert speeds == sorted(speeds)
    assert all(estimate.verdict == "yes" for estimate in found.values())
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("rtx-4090: fits yes, 0.")
    assert said[-1].startswith("context 0.")


SPLIT = {"micro_batch_size": 8, "gradient_accumulation_steps": 2}
MIXED = {"lora_rank": 8, "precision": "bf16-mixed", **SPLIT}


@pytest.mark.parametrize(
    ("knobs", "steps", "tolerance", "loops"),
    [
        # more than one pass
        ({}, 17, 1e-5, ("own_loop", "with_lightning", "with_accelerate")),
        # slow on a CPU without products of bf16; of the same step one loop tells
        (MIXED, 5, 1e-3, ("own_loop",)),
    ],
)
def test_the_neighbours_losses_are_autofits(
    example: Example,
    knobs: dict[str, Any],
    steps: int,
    tolerance: float,
    loops: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**example("hf_trainer").CONFIG, **knobs}
    mine, of_trainer = example("hf_trainer").main(config, steps)
    assert len(mine) == steps
    assert of_trainer == pytest.approx(mine, rel=tolerance)
    assert steps < 17 or mine[-1] < 0.98 * mine[0]

    for name in loops:
        own_loop = example(name)
        # of the same config, model and data
        monkeypatch.setattr(own_loop, "losses_of_autofit", lambda *_: mine)
        _, of_own_loop = own_loop.main(config, steps)
        assert of_own_loop == mine, "to the bit: it is the same step"


def test_a_technique_of_ones_own_takes_effect_and_leaves_the_mathematics_alone(
    example: Example,
) -> None:
    workload = example("own_technique").workload()
    seen = {}
    for value in ("contiguous", "channels_last"):
        torch.manual_seed(0)
        setup = build(workload, {"memory_format": value}, tiny.CPU, model=workload.model())
        torch.manual_seed(1)
        loss = accumulate(setup, workload.batch(4))
        weight = setup.model[0].weight
        seen[value] = loss, weight.grad, weight.is_contiguous(memory_format=torch.channels_last)
        setup.close()
        assert not setup.model._forward_pre_hooks
    assert not seen["contiguous"][2]
    assert seen["channels_last"][2]
    torch.testing.assert_close(seen["contiguous"][:2], seen["channels_last"][:2])


@pytest.mark.usefixtures("shared_zygote")
def test_it_is_searched_when_its_file_is_run(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / "own_technique.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "samples/s  " in line]
    assert sorted((row[2], row[4]) for row in rows) == [
        (memory_format, size)
        for memory_format in ("channels_last", "contiguous")
        for size in ("16", "32")
    ]


@pytest.mark.usefixtures("shared_zygote")
def test_and_from_the_command_line(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "memory_format=channels_last",
        "micro_batch_size=32",
        "optimizer=adamw",
        "precision=fp32",
    )
    arguments = [
        "search",
        "--model",
        f"{EXAMPLES / 'own_technique.py'}:workload",
        "--device",
        "cpu",
        "--mem",
        "1",
    ]
    for setting in settings:
        arguments += ["--set", setting]
    with pytest.raises(SystemExit) as end:
        command_line([*arguments, "--trials", "1", "--quiet", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert answer["best"]["config"]["memory_format"] == "channels_last"
    assert answer["best"]["measured"]["verified"]


def test_several_devices_train_and_one_goes_on(example: Example, tmp_path: Path) -> None:
    example("classifier")
    trained = example("several_gpus").main(steps=24, output=tmp_path / "run")
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in steps] == list(range(1, 25)), (
        "twelve of two devices, then twelve of one"
    )
    assert sum(each["loss"] for each in steps[-4:]) < 0.8 * sum(each["loss"] for each in steps[:4])
    assert [report.step for report in trained.history] == list(range(1, 25))


def test_the_docs_name_every_knob_and_its_values() -> None:
    page = (EXAMPLES.parent / "docs" / "knobs.md").read_text()
    knobs = page.split("## All knobs")[1].split("\n## ")[0]
    rows = [line for line in knobs.splitlines() if line.startswith("| `")]
    by_knob = {row.split("`")[1]: row for row in rows}
    assert by_knob.keys() == {technique.name for technique in techniques.all_techniques()}
    for technique in techniques.all_techniques():
        assert all(
            f"`{formatting.value(each)}`" in by_knob[technique.name] for each in technique.values
        )
