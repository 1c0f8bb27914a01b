"""The tools for denoisers: their files hold keys alone that each tool's own source reads."""

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from autofit.core.errors import InputError
from autofit.export.from_result import export
from autofit.export.pictures import FLUX, QWEN_IMAGE, SD_15, SD_35, SDXL, WAN, Pictures
from autofit.export.source import ExportSource
from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import LORA, OF_PICTURES, PICTURES, configs, source

KEYS = Path(__file__).parent / "accepted_keys"
FAMILIES = {
    SD_15: (SD_15, "sd-1.5", 512, 512, None, 77, (0, 0)),
    SDXL: (SDXL, "sdxl", 1024, 1024, None, 77, (0, 0)),
    SD_35: (SD_35, "sd-3.5", 1024, 768, None, 333, (38, 0)),
    FLUX: (FLUX, "flux", 1024, 1024, None, 512, (19, 38)),
    QWEN_IMAGE: (QWEN_IMAGE, "qwen", 1328, 1328, None, 512, (60, 0)),
    WAN: (WAN, "wan", 832, 480, 81, 512, (40, 0)),
}
# Of those whose text encoders can be trained.
ENCODERS = {SD_15: ("text_encoder",), SDXL: ("text_encoder", "text_encoder_2")}
# Of ai-toolkit, what stands around the sections of a process.
_AROUND = ("type", "training_folder", "device")
QLORA: dict[str, Any] = {
    **LORA,
    "optimizer": "adamw-8bit",
    "activation_checkpointing": "full",
    "quantization": "nf4",
}


def of_family(family: str, **knobs: Any) -> ExportSource:
    """A config of a denoiser of one family."""
    others = {"pictures": Pictures(*FAMILIES[family])}
    return source(task="diffusion", others=others, **knobs)


def with_encoders(family: str, **knobs: Any) -> ExportSource:
    """The same with its text encoders trained, too."""
    alone = of_family(family, **knobs)
    assert alone.pictures is not None
    return replace(alone, pictures=replace(alone.pictures, text_encoders=ENCODERS[family]))


def departures(made: Export) -> dict[str, bool]:
    """Which knobs a tool departs from, and whether the config may no longer fit."""
    return {departure.knob: departure.may_not_fit for departure in made.departures}


def accepted(tool: str) -> frozenset[str]:
    """What a tool's source reads, as it was listed."""
    head, *names = (KEYS / f"{tool}.txt").read_text(encoding="utf-8").splitlines()
    assert head.startswith("# ")
    return frozenset(names)


def command(text: str) -> list[str]:
    """The words of a script's one command."""
    return shlex.split(text, comments=True)


def written(tool: str, made: Export) -> Iterator[str]:
    """The keys of an export, as the list of the tool has them."""
    text = next(iter(made.files.values()))
    if tool == "sdscripts":
        (line,) = (line for line in text.splitlines() if "accelerate launch" in line)
        script = line.partition("accelerate launch ")[2].partition(".py")[0]
        yield from (f"{script}.{name}" for name in tomllib.loads(text))
    elif tool == "diffusers":
        words = command(text)
        script = words[2].removesuffix(".py")
        yield from (f"{script}.{word[2:]}" for word in words if word.startswith("--"))
    elif tool == "onetrainer":
        yield from _paths({k: v for k, v in json.loads(text).items() if k != "_comment"})
    else:
        (process,) = yaml.safe_load(text)["config"]["process"]
        inner = {name: value for name, value in process.items() if name not in _AROUND}
        (inner["datasets"],) = inner["datasets"]
        yield from _paths(inner)


def _paths(keys: Mapping[str, Any]) -> Iterator[str]:
    for name, value in keys.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tool", OF_PICTURES)
@given(knobs=configs())
@settings(max_examples=30)
def test_every_key_is_read_by_the_tools_own_source(
    tool: str, family: str, knobs: dict[str, Any]
) -> None:
    try:
        made = write(tool_named(tool), of_family(family, **knobs))
    except InputError:  # full training, or a family that the tool does not know
        return
    assert set(written(tool, made)) <= accepted(tool)


@pytest.mark.parametrize("tool", OF_PICTURES)
def test_full_training_and_other_denoisers_are_refused_in_a_sentence(tool: str) -> None:
    with pytest.raises(InputError, match="written here for adapters"):
        write(tool_named(tool), of_family(FLUX))
    unknown = replace(of_family(FLUX, **LORA), pictures=replace(PICTURES, family=None))
    with pytest.raises(InputError, match="does not train this denoiser"):
        write(tool_named(tool), unknown)
    with pytest.raises(InputError, match="neither"):
        write(tool_named(tool), replace(unknown, pictures=None))
    with pytest.raises(InputError, match="trains diffusion, and this is causal-lm"):
        write(tool_named(tool), source(**LORA))


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("tool", OF_PICTURES)
@given(knobs=configs())
@settings(max_examples=30)
def test_every_key_of_trained_text_encoders_is_read(
    tool: str, family: str, knobs: dict[str, Any]
) -> None:
    try:
        made = write(tool_named(tool), with_encoders(family, **knobs))
    except InputError:
        return
    assert set(written(tool, made)) <= accepted(tool)


def test_text_encoders_that_are_trained_are_said_to_every_tool() -> None:
    keys = tomllib.loads(write(tool_named("sdscripts"), with_encoders(SDXL, **LORA)).text)
    assert not keys["network_train_unet_only"] and not keys["cache_text_encoder_outputs"]
    of_sd = write(tool_named("sdscripts"), with_encoders(SD_15, **LORA, lora_plus=16.0))
    assert tomllib.loads(of_sd.text)["network_args"] == ["loraplus_lr_ratio=16.0"]
    assert "text_encoder" not in departures(of_sd)

    made = write(tool_named("aitoolkit"), with_encoders(SDXL, **LORA))
    (process,) = yaml.safe_load(made.text)["config"]["process"]
    assert process["train"]["train_text_encoder"]
    assert not process["train"]["cache_text_embeddings"]
    assert not process["datasets"][0]["cache_text_embeddings"]

    made = write(tool_named("onetrainer"), with_encoders(SDXL, **QLORA))
    keys = json.loads(made.text)
    for name in ("text_encoder", "text_encoder_2"):
        assert keys[name]["train"] and keys[name]["gradient_checkpointing"]
        assert keys[name]["weight_dtype"] == keys["unet"]["weight_dtype"] == "NFLOAT_4"
    assert not keys["text_encoder_3"]["train"]
    of_attention = with_encoders(SDXL, **{**QLORA, "lora_targets": "attention"})
    assert departures(write(tool_named("onetrainer"), of_attention))["lora_targets"]

    targets = "to_q+to_k+to_v+to_out.0+q_proj+k_proj+v_proj+out_proj"
    made = write(tool_named("diffusers"), with_encoders(SDXL, **{**LORA, "lora_targets": targets}))
    assert "--train_text_encoder" in command(made.text)
    assert departures(made).keys() >= {"vae"} and "lora_targets" not in departures(made)
    sorted_targets = "+".join(sorted(targets.split("+")))  # as a search writes them
    made = write(
        tool_named("diffusers"), with_encoders(SDXL, **{**LORA, "lora_targets": sorted_targets})
    )
    assert "lora_targets" not in departures(made)
    with pytest.raises(InputError, match=r"Stable Diffusion 1\.5 trains no text encoders"):
        write(tool_named("diffusers"), with_encoders(SD_15, **LORA))


def test_families_that_a_tool_does_not_train_are_named() -> None:
    refused = {}
    for tool in OF_PICTURES:
        found = [name for name in FAMILIES if tool_named(tool).why_not(of_family(name, **LORA))]
        refused[tool] = found
    assert refused == {
        "sdscripts": [QWEN_IMAGE, WAN],
        "aitoolkit": [],
        "onetrainer": [WAN],
        "diffusers": [WAN],
    }


def test_sd_scripts() -> None:
    made = write(tool_named("sdscripts"), of_family(FLUX, **QLORA, parameter_offload="cpu"))
    keys = tomllib.loads(made.files["sdscripts.toml"])
    assert keys["blocks_to_swap"] == 35  # the most that it takes of Flux
    assert (keys["network_module"], keys["network_dim"]) == ("networks.lora_flux", 16)
    assert (keys["mixed_precision"], keys["full_bf16"], keys["fp8_base"]) == ("bf16", True, True)
    assert (keys["optimizer_type"], keys["resolution"]) == ("AdamW8bit", "1024,1024")
    assert departures(made) == {"quantization": True, "lora_targets": False}

    for number, swapped in ((3, 1), (20, 12), (40, 26), (56, 35)):
        some = of_family(FLUX, **LORA, parameter_offload=f"cpu:{number}")
        keys = tomllib.loads(write(tool_named("sdscripts"), some).text)
        assert keys["blocks_to_swap"] == swapped

    of_sd3 = write(tool_named("sdscripts"), of_family(SD_35, **LORA, parameter_offload="cpu"))
    assert tomllib.loads(of_sd3.files["sdscripts.toml"])["blocks_to_swap"] == 36
    of_unet = write(tool_named("sdscripts"), of_family(SDXL, **LORA, parameter_offload="cpu"))
    assert departures(of_unet)["parameter_offload"]
    assert "accelerate launch sdxl_train_network.py --config_file sdscripts.toml" in of_unet.text
    plus = write(tool_named("sdscripts"), of_family(SD_15, **LORA, lora_plus=16.0))
    assert tomllib.loads(plus.text)["network_args"] == ["loraplus_unet_lr_ratio=16.0"]
    assert departures(plus)["text_encoder"]


def test_ai_toolkit() -> None:
    knobs = {**QLORA, "precision": "bf16-mixed"}
    made = write(tool_named("aitoolkit"), of_family(WAN, **knobs))
    (process,) = yaml.safe_load(made.text)["config"]["process"]
    assert process["model"]["arch"] == "wan21"
    assert (process["model"]["quantize"], process["model"]["qtype"]) == (True, "uint4")
    assert process["network"] == {
        "type": "lora",
        "linear": 16,
        "linear_alpha": 32,
        "dropout": 0.0,
        "transformer_only": True,
    }
    (data,) = process["datasets"]
    assert (data["num_frames"], data["resolution"]) == (81, [631])  # pixels as of 832x480
    assert process["train"]["gradient_accumulation"] == 4
    assert departures(made) == {"quantization": True, "lora_targets": False}
    assert departures(write(tool_named("aitoolkit"), of_family(SDXL, **LORA)))["precision"]
    some = write(tool_named("aitoolkit"), of_family(WAN, **LORA, parameter_offload="cpu:10"))
    (process,) = yaml.safe_load(some.text)["config"]["process"]
    assert process["model"]["layer_offloading_transformer_percent"] == 0.25  # of 40


def test_onetrainer() -> None:
    knobs = {**QLORA, "parameter_offload": "cpu", "activation_offload": "cpu"}
    made = write(tool_named("onetrainer"), of_family(FLUX, **knobs))
    keys = json.loads(made.text)
    part = keys["transformer"]
    assert (part["weight_dtype"], part["offload_fraction"]) == ("NFLOAT_4", 0.9)
    assert part["gradient_checkpointing"] and part["activation_offloading"]
    assert keys["optimizer"]["optimizer"] == "ADAMW_8BIT"
    assert keys["lora_weight_dtype"] == "BFLOAT_16"
    assert keys["text_encoder_2"] == {"train": False}
    assert keys["concepts"] == [{"name": "pictures", "path": "path/to/pictures"}]
    some = write(
        tool_named("onetrainer"), of_family(FLUX, **knobs | {"parameter_offload": "cpu:19"})
    )
    assert json.loads(some.text)["transformer"]["offload_fraction"] == round(19 / 57, 4)
    assert "parameter_offload" in departures(made).keys() - departures(some).keys()
    high = write(tool_named("onetrainer"), of_family(SD_35, **LORA))
    assert json.loads(high.text)["resolution"] == "1024x768"
    assert departures(write(tool_named("onetrainer"), of_family(SDXL, **LORA)))["lora_targets"]
    named = write(tool_named("onetrainer"), of_family(SDXL, **LORA | {"lora_targets": "to_q+to_k"}))
    assert json.loads(named.text)["layer_filter"] == "to_q,to_k"


def test_scripts_of_diffusers() -> None:
    made = write(tool_named("diffusers"), of_family(QWEN_IMAGE, **QLORA))
    words = command(made.files["train_diffusers.sh"])
    assert words[2] == "train_dreambooth_lora_qwen_image.py"
    assert words[words.index("--bnb_quantization_config_path") + 1] == "bits.json"
    assert json.loads(made.files["bits.json"])["bnb_4bit_quant_type"] == "nf4"
    assert "--use_8bit_adam" in words and "--allow_tf32" not in words
    of_flux = write(tool_named("diffusers"), of_family(FLUX, **QLORA))
    assert departures(of_flux)["quantization"]
    four = LORA | {"lora_targets": "to_q+to_k+to_v+to_out.0", "lora_alpha": 16}
    of_unet = write(tool_named("diffusers"), of_family(SDXL, **four))
    assert departures(of_unet) == {"text_encoder": True}
    assert departures(write(tool_named("diffusers"), of_family(SD_35, **LORA)))["resolution"]


def test_a_result_of_a_preset_is_exported(tmp_path: Path) -> None:
    result = {
        "autofit": 1,
        "model": "flux-dev",
        "workload": {"task": "diffusion", "effective_batch_size": 4},
        "source": {"kind": "preset", "model": "flux-dev", "resolution": "768x512"},
        "hardware": {"device": "cuda", "name": "RTX 4090", "budget_gib": 24.0},
        "config": {**LORA, "micro_batch_size": 1, "gradient_accumulation_steps": 4},
        "predicted": {"step_seconds": 1.0},
        "versions": {},
    }
    path = tmp_path / "result.yaml"
    path.write_text(yaml.safe_dump(result), encoding="utf-8")
    keys = tomllib.loads(export(path, to="sdscripts", output=tmp_path / "flux.toml").text)
    assert (keys["resolution"], keys["t5xxl_max_token_length"]) == ("768,512", 512)
    assert keys["pretrained_model_name_or_path"] == "black-forest-labs/FLUX.1-dev"
    assert (tmp_path / "flux.toml").is_file()
