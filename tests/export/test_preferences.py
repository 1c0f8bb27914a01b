"""What tools are told of preference training: their own names of the task, its loss and its reference."""

import dataclasses
from typing import Any

import pytest
import yaml

from autofit.core.tasks import TASKS
from autofit.export.tool import write
from autofit.export.tools import tool_named
from autofit.models.losses import LOSSES
from tests.export.sources import LORA, source

TASKS_OF_TOOLS = [
    (tool, task.name)
    for task in TASKS.values()
    for tool in task.tools
    if not tool_named(tool).file.endswith(".py")
]
FULL: dict[str, Any] = {"precision": "bf16-mixed"}


def keys_of(tool: str, task: str, **knobs: Any) -> dict[str, Any]:
    made = write(tool_named(tool), source(task=task, **knobs))
    keys: dict[str, Any] = yaml.safe_load(next(iter(made.files.values())))
    return keys


def instead(tool: str, task: str, **knobs: Any) -> str:
    """How a tool deviates in where the reference is."""
    made = write(tool_named(tool), source(task=task, **knobs))
    return " ".join(each.instead for each in made.departures if each.knob == "reference")


@pytest.mark.parametrize(("tool", "task"), TASKS_OF_TOOLS)
@pytest.mark.parametrize("knobs", [FULL, LORA], ids=["full", "LoRA"])
def test_the_tool_is_told_of_the_task_and_not_to_pack(
    tool: str, task: str, knobs: dict[str, Any]
) -> None:
    keys = keys_of(tool, task, **knobs)
    assert keys.items() >= TASKS[task].tools[tool].items()
    assert not keys.keys() & {
        "packing",
        "sample_packing",
        "packing_strategy",
        "completion_only_loss",
    }


def test_trl_is_called_by_the_name_of_the_task_and_knows_all_keys() -> None:
    trl = pytest.importorskip("trl")
    configs = {"dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig}
    for task, config in configs.items():
        made = write(tool_named("trl"), source(task=task, **LORA))
        assert f"trl {task} --config trl.yaml" in made.text
        known = {
            field.name
            for kind in (config, trl.ModelConfig, trl.ScriptArguments)
            for field in dataclasses.fields(kind)
        }
        assert keys_of("trl", task, **LORA).keys() - {"env"} <= known


# (tool, task, option, value) of all that a tool has a key for
OPTIONS = [
    ("trl", "dpo", {"kind": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
    ("axolotl", "dpo", {"kind": "hinge"}, {"rl": "dpo", "dpo_loss_type": ["hinge"]}),
    ("axolotl", "kto", {"desirable_weight": 2.0}, {"rl": "kto", "kto_desirable_weight": 2.0}),
    ("llamafactory", "dpo", {"kind": "ipo", "beta": 0.3}, {"pref_loss": "ipo", "pref_beta": 0.3}),
    ("llamafactory", "kto", {"undesirable_weight": 0.5}, {"kto_rejected_weight": 0.5}),
    ("msswift", "dpo", {"kind": "robust"}, {"loss_type": "robust"}),
    ("msswift", "simpo", {"gamma": 0.5}, {"rlhf_type": "simpo", "simpo_gamma": 0.5}),
    ("trl", "distill", {"mixture": 0.5}, {"beta": 0.5}),
    ("axolotl", "orpo", {"beta": 0.2}, {"orpo_alpha": 0.2}),
    ("trl", "reward", {"center": 0.01}, {"center_rewards_coefficient": 0.01}),
]


@pytest.mark.parametrize(("tool", "task", "options", "expected"), OPTIONS)
def test_options_of_the_loss_are_the_tools(
    tool: str, task: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    plain = write(tool_named(tool), source(task=task, **FULL))
    made = write(tool_named(tool), source(task=task, others={"loss_options": options}, **FULL))
    keys = yaml.safe_load(next(iter(made.files.values())))
    assert keys.items() >= expected.items()
    assert made.departures == plain.departures


def test_an_option_that_a_tool_lacks_is_said() -> None:
    for tool, options in {"llamafactory": {"kind": "robust"}, "trl": {"top_k": 8}}.items():
        task = "dpo" if "kind" in options else "distill"
        made = write(tool_named(tool), source(task=task, others={"loss_options": options}, **FULL))
        ((option, value),) = options.items()
        title = tool_named(tool).title
        assert f"{option} {value}: {title} takes no such option of the loss." in map(
            str, made.departures
        )


@pytest.mark.parametrize("task", [task.name for task in TASKS.values() if task.loss_keys])
def test_options_of_losses_are_options_of_the_loss(task: str) -> None:
    names = {field.name for field in dataclasses.fields(LOSSES[task])}
    for tool, keys in TASKS[task].loss_keys.items():
        assert tool in TASKS[task].tools
        assert keys.keys() <= names


@pytest.mark.parametrize("tool", ["trl", "axolotl"])
def test_answers_are_computed_before_training_where_they_were(tool: str) -> None:
    for value in ("resident", "precomputed"):
        keys = keys_of(tool, "dpo", **FULL, reference=value)
        assert keys["precompute_ref_log_probs"] == (value == "precomputed")
        assert instead(tool, "dpo", **FULL, reference=value) == ""
    assert instead(tool, "dpo", **LORA, reference="adapter-off") == ""
    assert "in less memory" in instead(tool, "dpo", **LORA, reference="resident")
    assert "in more memory" in instead(tool, "dpo", **FULL, reference="offloaded")


def test_a_tool_that_cannot_keeps_a_copy() -> None:
    said = instead("llamafactory", "dpo", **FULL, reference="precomputed")
    assert "keeps a copy of the model" in said
    assert "without its adapters" in instead("llamafactory", "kto", **LORA, reference="precomputed")


@pytest.mark.parametrize("tool", TASKS["kto"].by_micro_batch)
def test_a_distance_of_each_micro_batch_is_said(tool: str) -> None:
    def deviates(task: str, steps: int) -> bool:
        knobs = {"micro_batch_size": 8 // steps, "gradient_accumulation_steps": steps}
        made = write(tool_named(tool), source(task=task, **knobs))
        return "gradient_accumulation_steps" in [each.knob for each in made.departures]

    assert deviates("kto", 8)
    assert not deviates("kto", 1)
    assert not deviates("dpo", 8)


def test_only_trl_computes_the_loss_of_answers_in_chunks() -> None:
    def said(tool: str, loss: str) -> list[tuple[str, bool]]:
        made = write(tool_named(tool), source(task="dpo", **LORA, loss=loss))
        return [(each.instead, each.may_not_fit) for each in made.departures if each.knob == "loss"]

    assert said("trl", "chunked") == []
    ((instead, may_not_fit),) = said("trl", "standard")
    assert "in chunks" in instead
    assert not may_not_fit

    for tool in ("axolotl", "llamafactory"):
        assert said(tool, "standard") == []
        ((instead, may_not_fit),) = said(tool, "chunked")
        assert "all tokens, in more memory" in instead
        assert may_not_fit


def test_other_tools_say_what_they_train() -> None:
    assert "and this is dpo" in str(tool_named("torchtune").why_not(source(task="dpo")))
    assert "and this is embed" in str(tool_named("trl").why_not(source(task="embed")))
    assert "and this is distill" in str(tool_named("axolotl").why_not(source(task="distill")))
