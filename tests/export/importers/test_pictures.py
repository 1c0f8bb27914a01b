"""Files of tools for pictures: what their exporters write is read back; files as people write them
are read, changed where they stand, or refused in a sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.api.tool_file import Reading, choices_of_knobs, read
from autofit.api.tune import tune
from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.export.importers import document_of, importer_of
from autofit.export.importers.command_line import COMMAND
from autofit.export.importers.division import Division
from autofit.export.importers.importer import changes, config_of
from autofit.export.importers.known_keys import note_on_unknown
from autofit.export.importers.pictures import largest_resolution, preset_like
from autofit.export.importers.toml_document import TomlDocument
from autofit.export.pictures import FLUX, SD_15, SD_35, SDXL, Pictures
from autofit.export.tool import write
from autofit.export.tools import tool_named
from autofit.models.diffusion.pipeline import largest_bucket, preset_pipeline
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.meta_model import meta_model_from
from tests.export.sources import LORA, OFF, SIZES, source
from tests.models.diffusion.small import write_pipeline

TOOLS = {"sdscripts": "file.toml", "aitoolkit": "file.yaml", "onetrainer": "file.json"}
FAMILIES = {
    SD_15: Pictures(SD_15, "stable-diffusion-v1-5/stable-diffusion-v1-5", 512, 512, None, 77),
    SDXL: Pictures(SDXL, "stabilityai/stable-diffusion-xl-base-1.0", 1024, 1024, None, 77),
    SD_35: Pictures(SD_35, "stabilityai/stable-diffusion-3.5-large", 1024, 768, None, 333, (38, 0)),
    FLUX: Pictures(FLUX, "black-forest-labs/FLUX.1-dev", 1024, 1024, None, 512, (19, 38)),
}
ADAPTERS = {**LORA, "precision": "bf16-mixed", "lora_alpha": 8}
WITH_ENCODERS = {
    family: replace(FAMILIES[family], text_encoders=folders)
    for family, folders in {
        SD_15: ("text_encoder",),
        SDXL: ("text_encoder", "text_encoder_2"),
    }.items()
}
CASES: dict[str, dict[str, Any]] = {
    "lora": ADAPTERS,
    "8 bits": {
        **ADAPTERS,
        "quantization": "int8",
        "optimizer": "adamw-8bit",
        "activation_checkpointing": "full",
    },
    "streamed": {
        **ADAPTERS,
        "activation_checkpointing": "full",
        "parameter_offload": "cpu:19",
    },
}
SDXL_TOML = """\
# Somebody's SDXL.
[model]
pretrained_model_name_or_path = "sd_xl_base_1.0.safetensors"  # local
[data]
train_data_dir = "photos"
resolution = "1024,1024"
cache_latents = true
[training]
network_module = "networks.lora"
network_dim = 16
network_alpha = 8
network_train_unet_only = true
gradient_accumulation_steps = 4
mixed_precision = "bf16"
gradient_checkpointing = true  # to be safe
optimizer_type = "adamw8bit"
optimizer_args = ["weight_decay=0.01"]
sdpa = true
"""
FLUX_COMMAND = """\
accelerate launch --num_cpu_threads_per_process 1 sd-scripts/flux_train_network.py \\
  --pretrained_model_name_or_path=flux1-dev.safetensors \\
  --dataset_config=pictures.toml \\
  --network_module=networks.lora_flux --network_dim=16 --network_train_unet_only \\
  --optimizer_type=AdamW8bit --mixed_precision=bf16 --gradient_checkpointing \\
  --blocks_to_swap=18 --cache_text_encoder_outputs --cache_latents
"""
DATASETS = """\
[general]
batch_size = 2
[[datasets]]
resolution = [768, 768]
[[datasets]]
resolution = 1024
[[datasets.subsets]]
image_dir = "photos"
"""
AI_TOOLKIT = """\
job: extension
config:
  name: mine
  process:
    - type: sd_trainer  # the only one
      network:
        type: lora
        linear: 16
        linear_alpha: 16
      datasets:
        - folder_path: photos
          resolution: [512, 768, 1024]
          cache_latents_to_disk: true
      train:
        batch_size: 1
        gradient_accumulation_steps: 4
        gradient_checkpointing: true  # needed
        optimizer: adamw8bit
        dtype: bf16
      model:
        name_or_path: black-forest-labs/FLUX.1-dev
        is_flux: true
        quantize: true
        layer_offloading: true
        layer_offloading_transformer_percent: 0.7
"""
ONE_TRAINER = """\
{
    "base_model_name": "black-forest-labs/FLUX.1-dev",
    "model_type": "FLUX_DEV_1",
    "training_method": "LORA",
    "batch_size": 4,
    "resolution": "512,768",
    "transformer": {"weight_dtype": "NFLOAT_4", "offload_fraction": 0.5},
    "text_encoder": {"train": false, "weight_dtype": "BFLOAT_16"},
    "train_dtype": "BFLOAT_16",
    "layer_filter": "attn,ff.net"
}
"""


def in_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def read_text(folder: Path, name: str, text: str, **others: Any) -> Reading:
    return read(in_file(folder, name, text), **others)


def set_knobs(found: Reading) -> dict[str, Any]:
    """The knobs that a file switches on."""
    config = found.before.config
    return {name: value for name, value in config.items() if value != OFF.get(name)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("facts", [*FAMILIES.values(), *WITH_ENCODERS.values()])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_written_is_read_back(tool: str, facts: Pictures, case: str) -> None:
    family = facts.family
    exported = source(task="diffusion", others={"pictures": facts}, **CASES[case])
    made = write(tool_named(tool), exported)
    keys = document_of(next(iter(made.files.values())), TOOLS[tool]).keys
    importer = importer_of(keys, "file")
    assert importer.tool.name == tool
    assert importer.refuse(keys) is None
    assert note_on_unknown(tool, keys) is None

    assert importer.pictures is not None
    asked = importer.pictures(keys)
    assert asked.family in (family, None)  # the two UNets of sd-scripts share a file
    assert asked.trains_text_encoders == bool(facts.text_encoders)
    assert asked.resolution in (
        f"{facts.width}x{facts.height}",
        "886x886",
    )  # of ai-toolkit: an area
    preset, note = preset_like(keys[importer.model], asked.family)
    assert preset_pipeline(preset).source["model"] == preset
    assert note is None

    beginning = replace(exported, config=Config({**OFF, **dict.fromkeys(SIZES, 1)}))
    found = config_of(importer, keys, beginning, choices_of_knobs(), Division())
    deviating = {departure.knob for departure in made.departures}
    for knob, value in exported.config.items():
        if knob in importer.tool.knobs and knob not in deviating | {"lora_targets"}:
            assert found[knob] == value, knob

    again = replace(exported, config=found.replace(lora_targets=exported.config.lora_targets))
    assert changes(importer, keys, exported, again, set(found) - deviating) == {}


def test_kohyas_toml(tmp_path: Path) -> None:
    found = read_text(tmp_path, "mine.toml", SDXL_TOML)
    assert found.model == "sdxl"
    assert set_knobs(found) == {
        "precision": "bf16-mixed",
        "lora_alpha": 8,
        "lora_rank": 16,
        "lora_targets": "all-linear",
        "activation_checkpointing": "full",
        "gradient_accumulation_steps": 4,
        "micro_batch_size": 1,
        "optimizer": "adamw-8bit",
    }
    notes = " ".join(found.notes)
    assert "taken to have the shape of sdxl" in notes
    assert "1.5 GiB" in notes  # text encoders
    assert "VAE" not in notes

    plain = replace(
        found.before,
        config=found.before.config.replace(
            activation_checkpointing="none", optimizer="adamw-foreach"
        ),
    )
    changed = changes(
        found.importer,
        found.document.keys,
        found.before,
        plain,
        ("activation_checkpointing", "optimizer"),
    )
    text = found.document.changed(changed)
    before, after = SDXL_TOML.splitlines(), text.splitlines()
    assert [line for line in after if line not in before] == [
        "gradient_checkpointing = false  # to be safe",
        'optimizer_type = "AdamW"',
        'optimizer_args = ["weight_decay=0.01", "foreach=True"]',
    ]
    assert len(after) == len(before)


def test_kohyas_commands_with_a_file_of_datasets(tmp_path: Path) -> None:
    in_file(tmp_path, "pictures.toml", DATASETS)
    found = read_text(tmp_path, "train.sh", FLUX_COMMAND)
    assert found.document.keys[COMMAND] == "python flux_train_network"
    assert (found.workload.batch.width, found.workload.batch.height) == (1024, 1024)
    knobs = set_knobs(found)
    assert (knobs["micro_batch_size"], knobs["parameter_offload"]) == (2, "cpu:28")
    assert (knobs["lora_alpha"], knobs["lora_rank"]) == (1, 16)
    assert found.importer.keeps(found.document.keys) == ("train_batch_size",)

    off = {"gradient_checkpointing": False, "blocks_to_swap": 0, "torch_compile": True}
    text = found.document.changed(off)
    assert text == FLUX_COMMAND.replace(" --gradient_checkpointing", "").replace(
        "swap=18", "swap 0"
    ).replace("blocks_to_swap=", "blocks_to_swap ").replace(
        "--cache_latents", "--cache_latents \\\n  --torch_compile"
    )


def test_jobs_of_ai_toolkit(tmp_path: Path) -> None:
    found = read_text(tmp_path, "job.yaml", AI_TOOLKIT)
    knobs = set_knobs(found)
    assert knobs["lora_rank"] == 16
    assert (knobs["micro_batch_size"], knobs["gradient_accumulation_steps"]) == (1, 4)
    assert (knobs["quantization"], knobs["parameter_offload"]) == ("int8", "cpu:40")  # of 57
    assert found.workload.batch.width == 1024
    notes = " ".join(found.notes)
    assert "text encoders stay" in notes
    assert "VAE" not in notes

    train = "config.process.0.train"
    text = found.document.changed({f"{train}.batch_size": 4, f"{train}.sdp": True})
    before, after = AI_TOOLKIT.splitlines(), text.splitlines()
    new = [line.strip() for line in after if line not in before]
    assert sorted(new) == ["batch_size: 4", "sdp: true"]
    assert document_of(text, "job.yaml").keys[f"{train}.gradient_checkpointing"] is True


def test_files_of_one_trainer(tmp_path: Path) -> None:
    found = read_text(tmp_path, "mine.json", ONE_TRAINER)
    knobs = set_knobs(found)
    assert (knobs["quantization"], knobs["micro_batch_size"]) == ("nf4", 4)
    assert knobs["parameter_offload"] == "cpu:28"  # of 57
    assert knobs["precision"] == "bf16-mixed"
    assert found.workload.batch.width == 768
    assert set(str(knobs["lora_targets"]).split("+")) == {"attn", "ff"}

    text = found.document.changed({"transformer.gradient_checkpointing": False})
    assert document_of(text, "a.json").keys["transformer.gradient_checkpointing"] is False


def with_encoders(text: str, *removed: str) -> str:
    """A file of sd-scripts that trains text encoders, as most do."""
    text = text.replace("network_train_unet_only = true\n", "").replace(
        " --network_train_unet_only", ""
    )
    for part in removed:
        text = text.replace(part, "")
    return text


ONE_TRAINER_SDXL = """\
{
    "base_model_name": "stabilityai/stable-diffusion-xl-base-1.0",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "training_method": "LORA",
    "batch_size": 4,
    "resolution": "512",
    "unet": {"weight_dtype": "BFLOAT_16", "train": true},
    "text_encoder": {"train": true, "weight_dtype": "BFLOAT_16"},
    "text_encoder_2": {"train": true, "weight_dtype": "BFLOAT_16"},
    "train_dtype": "BFLOAT_16",
    "layer_filter": "attn,ff.net"
}
"""
AI_TOOLKIT_SDXL = (
    AI_TOOLKIT.replace("is_flux: true", "arch: sdxl")
    .replace("black-forest-labs/FLUX.1-dev", "mine.safetensors")
    .replace("      train:\n", "      train:\n        train_text_encoder: true\n")
)


def test_kohyas_files_that_train_text_encoders(tmp_path: Path) -> None:
    found = read_text(tmp_path, "mine.toml", with_encoders(SDXL_TOML) + "clip_skip = 2\n")
    assert found.workload.source["train_text_encoders"] is True
    assert found.workload.batch.vocabularies == {"prompt_ids": 49408, "prompt_ids_2": 49408}
    assert set_knobs(found)["lora_targets"] == "all-linear"
    notes = " ".join(found.notes)
    assert "text encoders stay" not in notes
    assert "clip_skip is not followed" in notes
    assert "gradients of the text encoders' embeddings" in notes and "0.19 GiB" in notes


def test_jobs_and_files_that_train_text_encoders(tmp_path: Path) -> None:
    found = read_text(tmp_path, "job.yaml", AI_TOOLKIT_SDXL)
    assert found.workload.source["train_text_encoders"] is True
    assert "text encoders stay" not in " ".join(found.notes)

    found = read_text(tmp_path, "mine.json", ONE_TRAINER_SDXL)
    assert found.workload.source["train_text_encoders"] is True
    targets = str(found.before.config["lora_targets"]).split("+")
    assert "text_projection" in targets or "text_encoder_2" in targets
    model = meta_model_from(found.workload.model)
    layers, _ = adapter_targets(model, "+".join(targets))
    assert sum(name.startswith("text_encoder.") for name in layers) == 12 * 6
    assert all(".attn" in name or ".ff.net" in name for name in layers if name.startswith("unet."))


REFUSED = [
    ("train.sh", with_encoders(FLUX_COMMAND, "--dataset_config=pictures.toml"), "text encoders"),
    ("mine.toml", with_encoders(SDXL_TOML) + "max_token_length = 225\n", "225 beside trained"),
    (
        "mine.toml",
        with_encoders(SDXL_TOML) + "cache_text_encoder_outputs = true\n",
        "goes with network_train_unet_only = true alone",
    ),
    ("mine.toml", SDXL_TOML + "network_train_text_encoder_only = true\n", "are trained alone"),
    (
        "job.yaml",
        AI_TOOLKIT.replace("      train:\n", "      train:\n        train_text_encoder: true\n"),
        "text encoders of this model",
    ),
    (
        "job.yaml",
        AI_TOOLKIT_SDXL.replace(
            "        batch", "        unload_text_encoder: true\n        batch"
        ),
        "trains nothing",
    ),
    (
        "mine.json",
        ONE_TRAINER_SDXL.replace('encoder": {"train": true', 'encoder": {"train": false'),
        "one alone is trained",
    ),
    (
        "mine.json",
        ONE_TRAINER_SDXL.replace('"BFLOAT_16", "train"', '"NFLOAT_4", "train"'),
        "BFLOAT_16 beside NFLOAT_4",
    ),
    ("mine.toml", SDXL_TOML.replace("networks.lora", "lycoris.kohya"), "lycoris.kohya is not"),
    ("mine.toml", SDXL_TOML.replace("adamw8bit", "Prodigy"), "'Prodigy' is nothing"),
    ("mine.toml", SDXL_TOML.replace("sd_xl_base_1.0", "mine"), "what kind of model"),
    ("mine.toml", SDXL_TOML + 'network_args = ["conv_dim=4"]\n', "conv_dim=4 is not known"),
    ("mine.toml", SDXL_TOML + "network_dim = 8\n", "no valid TOML"),
    ("mine.toml", SDXL_TOML.replace("[data]", "[data]\nnetwork_dim = 8"), "network_dim twice"),
    ("mine.toml", SDXL_TOML.replace('"1024,1024"', '"large"'), "must be pixels"),
    ("train.sh", FLUX_COMMAND, "pictures.toml, which is not there"),
    ("train.sh", FLUX_COMMAND.replace("launch", "launch --multi_gpu"), "several devices"),
    ("train.sh", "python train_network.py --config_file a.toml", "Tune that file"),
    ("gui.json", '{"pretrained_model_name_or_path": "a", "LoRA_type": "Standard"}', "kohya's GUI"),
    ("job.yaml", AI_TOOLKIT.replace("type: lora", "type: lokr"), "lokr is not known"),
    ("job.yaml", AI_TOOLKIT.replace("is_flux: true", "arch: chroma"), "chroma is not known"),
    ("mine.json", ONE_TRAINER.replace('"LORA"', '"FINE_TUNE"'), "FINE_TUNE is not tuned"),
    ("mine.json", ONE_TRAINER.replace("FLUX_DEV_1", "SANA"), "SANA is not known"),
    ("mine.json", ONE_TRAINER.replace('"train": false', '"train": true'), "text encoders"),
    ("mine.json", ONE_TRAINER.replace('"batch_size": 4', '"layer_offload_fraction": 0'), "older"),
]


@pytest.mark.parametrize(("name", "text", "reason"), REFUSED)
def test_what_cannot_be_tuned_is_told_in_a_sentence(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        read_text(tmp_path, name, text)


def test_sizes_and_buckets() -> None:
    assert largest_resolution([], "resolution") is None
    assert largest_resolution([512, "768x1024", [640, 640]], "resolution") == "768x1024"
    assert largest_bucket(preset_pipeline("sdxl"), 1024, 768) == (1024, 768)
    assert largest_bucket(preset_pipeline("wan-1.3b"), 632, 632) == (624, 640)
    width, height = largest_bucket(preset_pipeline("flux-dev"), 1000, 1000)
    assert 0.99 * 1000**2 < width * height <= 1000**2
    assert not (width % 16 or height % 16)


def test_models_by_their_names() -> None:
    assert preset_like("runwayml/sd-v1-5.safetensors", None)[0] == "sd-1.5"
    assert preset_like("local/wan2.1-t2v-1.3b", None)[0] == "wan-1.3b"
    assert preset_like("my-model.safetensors", SD_35)[0] == "sd-3.5-large"
    assert preset_like("sd3.5_medium.safetensors", None)[0] == "sd-3.5-medium"


def test_only_what_costs_is_another_and_the_file_is_read_again(tmp_path: Path) -> None:
    pipeline = write_pipeline(tmp_path / "small", "sdxl")
    text = SDXL_TOML.replace("1024,1024", "128,128")
    path = in_file(tmp_path, "mine.toml", text)
    tuned = tune(path, model=str(pipeline), gpu="rtx-3060")
    assert tuned.changes == {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
    }
    assert tuned.before and tuned.after
    assert tuned.after.step_seconds < tuned.before.step_seconds
    again = read_text(tmp_path, "again.toml", tuned.text, model=str(pipeline))
    assert again.before.config["activation_checkpointing"] == "none"
    unchanged = {"train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"}
    before, after = (TomlDocument.of(each, "a").keys for each in (text, tuned.text))
    assert {key: before[key] for key in before if key not in unchanged} == {
        key: after[key] for key in after if key not in unchanged
    }
