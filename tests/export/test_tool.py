"""Every tool: no knob is dropped silently, and the header says what was measured."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from autofit.core.errors import InputError
from autofit.export.tool import Export, Request, Tool, ToolKeys, nested, write
from autofit.export.tools import all_tools, tool_named
from tests.export.sources import CASES, LORA, OF_PICTURES, OFF, configs, for_tool, source

TOOLS = [tool.name for tool in all_tools()]
# Their null is worked out from other knobs, and may be what is given.
_READERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
FREE = (
    "lora_targets",
    "lora_alpha",
    "lora_dropout",
    "micro_batch_size",
    "gradient_accumulation_steps",
)


def exported(name: str, case: str) -> Export:
    given_ = for_tool(name, **CASES[case])
    reason = tool_named(name).why_not(given_)
    if reason:
        pytest.skip(reason)
    return write(tool_named(name), given_)


def said(made: Export) -> str:
    """The text of an export's files on one line; that of JSON is its first key."""
    texts = [
        " ".join(json.loads(text).get("_comment", ()))
        if file.endswith(".json")
        else text.replace("#", "")
        for file, text in made.files.items()
    ]
    return " ".join(" ".join(texts).split())


@pytest.mark.parametrize("name", TOOLS)
@given(knobs=configs())
@settings(max_examples=60)
def test_every_knob_has_keys_or_a_deviation(name: str, knobs: dict[str, Any]) -> None:
    given_ = for_tool(name, **knobs)
    try:
        made = write(tool_named(name), given_)
    except InputError:  # a combination that the tool refuses as a whole
        return
    departures = {each.knob for each in made.departures}
    for knob, value in given_.config.items():
        if value == OFF.get(knob) or knob in departures:
            continue
        share = tool_named(name).knobs[knob]
        if share(Request(given_, made.version, name)).as_measured:
            continue
        assert made.keys[knob], f"{knob} {value} has neither keys nor a deviation"
        if knob not in FREE:
            off = for_tool(name, **{**knobs, knob: OFF[knob]})
            keys_of_off = share(Request(off, made.version, name)).keys
            assert keys_of_off != made.keys[knob], f"{knob} {value} has the keys of off"


@pytest.mark.parametrize("name", TOOLS)
def test_attention_that_cannot_be_chosen_is_no_deviation(name: str) -> None:
    made = write(tool_named(name), for_tool(name, **LORA, attention=None))
    assert "attention" not in {each.knob for each in made.departures}


@pytest.mark.parametrize("name", TOOLS)
def test_a_technique_of_ones_own_is_a_deviation(name: str) -> None:
    made = write(tool_named(name), for_tool(name, **LORA, channels="last"))
    (departure,) = (each for each in made.departures if each.knob == "channels")
    assert departure.may_not_fit
    assert str(departure) in said(made)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TOOLS)
def test_the_header_says_what_was_measured_where_and_with_what(name: str, case: str) -> None:
    made = exported(name, case)
    text = said(made)
    where = (
        "4 x NVIDIA H200, within 24 GiB each"
        if "data_parallel" in CASES[case]
        else "NVIDIA H200, within 24 GiB"
    )
    assert f"Measured on {where} and verified in longer runs: 5,120 tokens per second" in text
    assert f"{tool_named(name).title} {tool_named(name).versions[-1]}" in text
    assert "torch 2.13.0" in text
    if for_tool(name).task == "causal-lm":
        assert "The loss: " in text
    for each in made.departures:
        assert str(each) in text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TOOLS)
def test_files_hold_the_keys_of_every_knob(name: str, case: str) -> None:
    made = exported(name, case)
    file, text = next(iter(made.files.items()))
    if file.endswith((".py", ".sh")) or name in ("transformers", "unsloth"):
        return  # their own tests read what is no plain data
    held = _READERS.get(PurePath(file).suffix, yaml.safe_load)(text)
    for other, text_of_it in made.files.items():
        if other.endswith("_accelerate.yaml"):
            held["accelerate"] = yaml.safe_load(text_of_it)
    for keys in made.keys.values():
        for path, value in keys.items():
            place = held
            for part in path.split("."):
                place = place[int(part)] if isinstance(place, list) else place[part]
            assert place == value, path


@pytest.mark.parametrize("name", TOOLS)
def test_no_yaml_holds_a_number_that_its_parser_reads_as_text(name: str) -> None:
    made = exported(name, "qlora")
    for file, text in made.files.items():
        if file.endswith(".yaml"):
            assert not [
                value
                for value in _leaves(yaml.safe_load(text))
                if isinstance(value, str) and "e-" in value
            ]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    return (
        [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list) else [value]
    )


def test_a_knob_that_a_tool_forgets_is_a_deviation() -> None:
    forgetful = Tool(
        title="Forgetful",
        versions=("1.0", "2.0"),
        run="forget",
        knobs={"compile": lambda request: ToolKeys({"compile": False})},
        fixed=lambda request: {},
        files=lambda source, keys, header, file: {"forgetful.yaml": "\n".join(header)},
    )
    assert {each.knob for each in write(forgetful, source()).departures} == {
        "micro_batch_size",
        "gradient_accumulation_steps",
    }
    made = write(forgetful, source(compile="default"))
    assert {"compile", "micro_batch_size", "gradient_accumulation_steps"} == {
        each.knob for each in made.departures
    }
    said = next(each for each in made.departures if each.knob == "compile")
    assert str(said) == "compile default: Forgetful has nothing for it, and runs without it."
    assert said.message.endswith("It may no longer fit.")


def test_dotted_paths_become_nested_mappings() -> None:
    assert nested({"a.b": 1, "c": 2, "a.d.e": 3}) == {"a": {"b": 1, "d": {"e": 3}}, "c": 2}


def test_versions_choose_the_keys() -> None:
    tool = tool_named("transformers")
    assert tool.schema(None) == tool.versions[-1]
    assert tool.schema("5.20.1") == "5.17.0"
    assert tool.schema(None, "5.20.1") == "5.17.0"
    assert tool.schema(None, "4.30") == "5.16.1"
    assert tool.schema("6.0") == tool.versions[-1]
    with pytest.raises(InputError, match=r"the keys of transformers 4\.30 are not known"):
        tool.schema("4.30")
    with pytest.raises(InputError, match="'newest' is not a version"):
        tool.schema("newest")


def test_a_config_that_a_tool_cannot_train_is_refused() -> None:
    with pytest.raises(InputError, match=r"transformers trains causal-lm, .*, and this is custom"):
        write(tool_named("transformers"), source(task="custom"))
    with pytest.raises(InputError, match="is not the effective batch of 16"):
        write(tool_named("transformers"), source(others={"effective_batch_size": 16}))


def test_an_unknown_tool_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="Did you mean 'transformers'"):
        tool_named("transformer")


def test_an_export_is_plain_data() -> None:
    made = write(tool_named("transformers"), source(loss="chunked"))
    data = json.loads(json.dumps(made.to_json()))
    assert data["departures"] == [
        {
            "knob": "loss",
            "value": "chunked",
            "instead": "Trainer holds the logits of all tokens, and needs more memory than measured",
            "may_not_fit": True,
        }
    ]


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "lightning"])
def test_convolutions_that_pytorch_rounds_are_a_deviation(name: str) -> None:
    def departures(device: str, task: str, precision: str = "fp32") -> set[str]:
        made = write(tool_named(name), source(device, task, precision=precision, lora_rank=0))
        return {each.message for each in made.departures if "convolutions" in each.message}

    (message,) = departures("cuda", "image-classification")
    assert (
        "precision fp32: PyTorch rounds convolutions to TF32 unless the script sets torch.backends.cudnn"
        in message
    )
    assert departures("cuda", "custom")
    assert not departures("cpu", "custom")
    assert not departures("cuda", "causal-lm")
    assert not departures("cuda", "image-classification", "bf16-mixed")


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_whose_autocast_keeps_copies_of_checkpointed_weights_may_need_more_memory(
    name: str,
) -> None:
    def told(**knobs: Any) -> bool:
        given_ = for_tool(
            name,
            **{
                "precision": "bf16-mixed",
                "lora_rank": 0,
                "activation_checkpointing": "full",
                **knobs,
            },
        )
        if tool_named(name).why_not(given_):
            return False
        departures = write(tool_named(name), given_).departures
        return any(
            "keeps a copy of every weight in bf16" in each.message and each.may_not_fit
            for each in departures
        )

    assert told() == (name not in ("axolotl", "lightning", "torchtune", "peft", *OF_PICTURES))
    assert not told(activation_checkpointing="none")
    assert not told(precision="bf16")
    assert not told(lora_rank=16, lora_targets="all-linear")


MIXTURE = {
    "experts": ("gate_up_proj", "down_proj"),
    "adapted_experts": ("down_proj",),
    "targets": ("q_proj",),
}
NAMED = {
    "precision": "bf16",
    "lora_rank": 16,
    "lora_targets": "down_proj+q_proj",
    "quantization": "nf4",
}


@pytest.mark.parametrize("name", TOOLS)
def test_experts_are_adapted_and_quantised_or_departed_from(name: str) -> None:
    given_ = for_tool(name, others=MIXTURE, **NAMED)
    if tool_named(name).why_not(given_):
        return
    made = write(tool_named(name), given_)
    departures = {each.knob for each in made.departures}
    adapts = name in ("axolotl", "msswift", "peft", "transformers", "trl")
    assert ("target_parameters" in made.text) == adapts == ("lora_targets" not in departures), (
        made.departures
    )
    assert (
        ("quantize_moe_experts" in made.text)
        == ("quantization" not in departures)
        == (name == "axolotl")
    )


@pytest.mark.parametrize("name", ["litgpt", "torchtitan", "torchtune"])
def test_tools_without_names_of_layers_say_so(name: str) -> None:
    given_ = source(**{**LORA, "lora_targets": "q_proj+v_proj"})
    departed = [each.message for each in write(tool_named(name), given_).departures]
    assert any(
        "lora_targets q_proj+v_proj" in each and "takes no names of layers" in each
        for each in departed
    )


@pytest.mark.parametrize("name", TOOLS)
def test_packing_has_a_key_or_is_told_where_the_tool_does_otherwise(name: str) -> None:
    tool = tool_named(name)
    knobs = LORA | ({"attention": "flash"} if tool.packs_beside_flash else {})
    for packing in (True, False, None):
        made = write(tool, for_tool(name, **knobs, others={"packing": packing}))
        told = [each for each in made.departures if each.knob == "packing"]
        always_apart = packing is True and tool.apart is True
        assert bool(told) == (
            always_apart or (None not in (tool.packs, packing) and tool.packs != packing)
        )
        key = tool.packing.rpartition(".")[2]
        assert not key or re.search(f"{key}(: |=){bool(packing)}", made.text, re.IGNORECASE)
        apart = write(tool, for_tool(name, **knobs, others={"packing": packing, "apart": True}))
        sees = "lets packed samples see" in " ".join(map(str, apart.departures))
        assert sees == (packing is True and tool.apart is False)
        assert (
            "packed one after the other" in said(made),
            "padded to the longest" in said(made),
        ) == (
            packing is True,
            packing is False,
        )
