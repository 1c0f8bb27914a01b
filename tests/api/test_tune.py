"""`autofit.tune`: what only costs is chosen, and nothing else in the file is another."""

import dataclasses
import json
import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import autofit
from autofit.api.estimate import predict
from autofit.api.tool_file import read
from autofit.api.tune import Tuned, save, searched_workload, settings_of
from autofit.core.config import Config
from autofit.core.errors import InputError, NothingFitsError
from autofit.core.estimate import Remedy
from autofit.core.workload import Workload
from autofit.export.importers.document import flat
from autofit.techniques import all_techniques
from autofit.tuning.predicted import CUT_SHORT
from tests import tiny
from tests.following import unfollowed

FILE = """\
# Somebody's file.
base_model: {model}  # the model
datasets:
  - path: some/data
    type: alpaca
sequence_len: 32
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 1  # to be safe
gradient_accumulation_steps: 8
optimizer: adamw_torch
learning_rate: 2.0e-4
bf16: auto
gradient_checkpointing: true
{more}
"""


def written(folder: Path, more: str = "") -> Path:
    model = folder / "model"
    model.mkdir()
    described = {**tiny.LLAMA, "architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(described))
    path = folder / "axolotl.yaml"
    path.write_text(FILE.format(model=model, more=more))
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """Predicted, for a card that is not there."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        unfollowed(patch)
        return autofit.tune(written(folder), gpu="rtx-4090")


def test_the_micro_batch_stays_where_it_decides_what_is_learnt() -> None:
    """KTO takes its distance of one, DPO's answers are compared one by one."""
    options = ["--model_name_or_path", "tiny-llama", "--max_length", "64"]
    sizes = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
    for stage, stays in (("kto", True), ("dpo", False)):
        settings = settings_of(read(["trl", stage, *options, *sizes]), (), ())
        assert (settings.get("micro_batch_size") == (2,)) is stays


def test_only_what_costs_is_another(tuned: Tuned) -> None:
    before = flat(yaml.safe_load(tuned.original))
    after = flat(yaml.safe_load(tuned.text))
    assert {key for key in after if after[key] != before.get(key)} == set(tuned.changes)
    learnt = ("base_model", "sequence_len", "lora_r", "lora_alpha", "optimizer", "bf16")
    assert all(before[key] == after[key] for key in learnt)
    assert not {"adapter", "learning_rate", "lora_target_linear"} & set(tuned.changes)
    assert after["micro_batch_size"] * after["gradient_accumulation_steps"] == 8
    assert after["micro_batch_size"] > 1
    assert "# to be safe" in tuned.text
    assert tuned.before and tuned.after
    assert tuned.after.step_seconds and tuned.before.step_seconds
    assert tuned.after.step_seconds < tuned.before.step_seconds


def test_the_difference_holds_the_changes_alone(tuned: Tuned) -> None:
    lines = tuned.diff.splitlines()
    assert lines[:2] == ["--- axolotl.yaml", "+++ axolotl.tuned.yaml"]
    gone = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert all(line[1:].split(":")[0] in tuned.changes for line in gone)
    assert tuned.to_dict()["text"] == tuned.text


def test_it_is_written_beside_the_file_or_over_it_with_its_permissions(
    tuned: Tuned, tmp_path: Path
) -> None:
    original = tuned.path.read_text()
    assert save(tuned).read_text() == tuned.text
    assert tuned.path.read_text() == original
    assert save(tuned, tmp_path / "other.yaml").read_text() == tuned.text

    tuned.path.chmod(0o640)
    assert save(tuned, in_place=True) == tuned.path
    assert tuned.path.read_text() == tuned.text
    assert stat.S_IMODE(tuned.path.stat().st_mode) == 0o640
    tuned.path.write_text(original)


def test_what_is_kept_stays_and_what_is_free_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def searched(*_: Any, **options: Any) -> Any:
        asked.update(options["set"])
        raise NothingFitsError("enough.", "")

    monkeypatch.setattr("autofit.api.tune.search", searched)
    path = written(tmp_path)
    given: dict[str, Any] = {"keep": ["gradient_checkpointing", "micro_batch_size"]}
    with pytest.raises(NothingFitsError):
        autofit.tune(path, **given, free=["optimizer"], gpu="rtx-4090")
    assert asked["activation_checkpointing"] == ("full",)
    assert asked["micro_batch_size"] == (1,)
    assert {"adamw-foreach", "adamw-8bit"} <= set(asked["optimizer"])
    assert asked["lora_rank"] == (8,)
    assert asked["precision"] == ("bf16-mixed",)

    # of the sizes one is searched, whose product stays
    with pytest.raises(NothingFitsError):
        autofit.tune(path, keep=["gradient_accumulation_steps"], gpu="rtx-4090")
    assert asked["micro_batch_size"] == (1,)
    assert "gradient_accumulation_steps" not in asked

    with pytest.raises(NothingFitsError):
        autofit.tune(path, gpu="rtx-4090")
    assert set(asked["optimizer"]) == {"adamw", "adamw-foreach"}
    assert {"full", "none"} <= set(asked["activation_checkpointing"])
    with pytest.raises(InputError, match="wings is no key that autofit tunes"):
        autofit.tune(path, free=["wings"], gpu="rtx-4090")


def test_where_nothing_fits_it_says_what_would_be_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = Remedy("memory", ("--gpu-mem", "3.7"), Config(), 2**31)
    cut_short = f"2 configs were predicted in time. {CUT_SHORT}"
    found = SimpleNamespace(config=None, remedies=(more,), notes=("another note.", cut_short))
    monkeypatch.setattr("autofit.api.tune.search", lambda *_, **__: found)
    with pytest.raises(NothingFitsError, match=r"take --gpu-mem 3\.7, which is predicted") as said:
        autofit.tune(written(tmp_path), gpu_mem=0.8)
    assert said.value.message.endswith(f"to fit. {cut_short}")


def test_packed_samples_keep_their_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def searched(*_: Any, **options: Any) -> Any:
        asked.update(options["set"])
        raise NothingFitsError("enough.", "")

    monkeypatch.setattr("autofit.api.tune.search", searched)
    more = "sample_packing: true\nattn_implementation: flash_attention_2"
    with pytest.raises(NothingFitsError):
        autofit.tune(written(tmp_path, more), gpu="rtx-4090")
    assert asked["attention"] == ("flash",)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("deepspeed: mine.json", "cannot be tuned: deepspeed: 'mine.json' is not beside"),
        ("deepspeed: zero3.json", "divides over devices, and does not say how many"),
        ("fsdp: [full_shard]", "Give --devices N"),
        ("optimizer: x", "the key 'optimizer' is given twice"),
        ("nested: !!python/name:os.system", "could not determine a constructor"),
        ("torch_compile_mode: reduce-overhead", "is nothing that autofit knows"),
        ("cutoff_len: 8", "has keys of axolotl and of LLaMA-Factory"),
    ],
)
def test_what_cannot_be_tuned_is_told_in_a_sentence(tmp_path: Path, more: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        read(written(tmp_path, more))
    assert "\n" not in str(caught.value)


SHARDED = """\
fsdp_version: 2
fsdp_config:
  offload_params: true  # it did not fit
  state_dict_type: FULL_STATE_DICT
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """The same on two devices, of which each holds a part of the weights."""
    folder = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        unfollowed(patch)
        return autofit.tune(written(folder, SHARDED), gpu="rtx-4090", devices=2, fast=True)


def test_on_several_devices_the_effective_batch_is_that_of_all_of_them(sharded: Tuned) -> None:
    before = flat(yaml.safe_load(sharded.original))
    after = flat(yaml.safe_load(sharded.text))
    assert {key for key in after if after[key] != before.get(key)} == set(sharded.changes)
    assert after["micro_batch_size"] * after["gradient_accumulation_steps"] == 8
    assert sharded.result.config
    assert sharded.result.config["data_parallel"] == "fsdp"
    assert after["fsdp_config.offload_params"] is False
    assert "offload_params: false  # it did not fit" in sharded.text
    assert sharded.before and sharded.after
    assert sharded.before.step_seconds and sharded.after.step_seconds
    assert sharded.after.step_seconds < sharded.before.step_seconds


def test_how_a_file_divides_devices_stays_unless_it_has_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def searched(workload: Workload, **options: Any) -> Any:
        asked.clear()
        asked.update(options["set"], devices=options["devices"])
        asked["batch"] = workload.effective_batch_size
        raise NothingFitsError("enough.", "")

    monkeypatch.setattr("autofit.api.tune.search", searched)
    with pytest.raises(NothingFitsError):
        autofit.tune(written(tmp_path, SHARDED), gpu="rtx-4090", devices=2)
    assert (asked["devices"], asked["batch"]) == (2, 16)
    assert asked["data_parallel"] == ("fsdp",)
    assert set(asked["reshard_after_forward"]) == {True, False}
    assert set(asked["fsdp_offload"]) == {"cpu", "none"}
    assert asked["data_parallel_replicate"] == (1,)

    key = "fsdp_config.reshard_after_forward"
    with pytest.raises(NothingFitsError):
        autofit.tune(tmp_path / "axolotl.yaml", gpu="rtx-4090", devices=2, keep=[key])
    assert asked["reshard_after_forward"] == (True,)

    (tmp_path / "second").mkdir()
    by_deepspeed = written(tmp_path / "second", "deepspeed: deepspeed_configs/zero2.json")
    with pytest.raises(NothingFitsError):
        autofit.tune(by_deepspeed, gpu="rtx-4090", devices=2)
    assert asked["fsdp_offload"] == ("cpu",)
    assert asked["reshard_after_forward"] == (False,)
    assert len(asked["optimizer"]) == len(asked["compile"]) == 1
    assert len(asked["activation_checkpointing"]) > 1


def test_devices_that_do_not_suit_a_file_are_told(tmp_path: Path) -> None:
    sizes = f"{SHARDED}dp_shard_size: 4"
    path = written(tmp_path, sizes)
    assert read(path).there.devices == 4
    assert read(path).before.effective_batch_size == 32
    with pytest.raises(InputError, match="is for 4 devices, and --devices says 2"):
        read(path, devices=2)
    assert read(path, nodes=2).there.world == 8
    assert read(path, nodes=2).before.effective_batch_size == 64

    path.write_text(path.read_text().replace("dp_shard_size: 4", "tensor_parallel_size: 3"))
    with pytest.raises(InputError, match="3, which does not divide 4 devices"):
        read(path, devices=4)
    path.write_text(path.read_text().replace("tensor_parallel_size: 3", "load_in_8bit: true"))
    with pytest.raises(InputError, match="cannot be tuned: data_parallel: int8 weights lose"):
        read(path, devices=4)
    with pytest.raises(InputError, match="divides over devices, and one was given"):
        read(path, devices=1)


def test_no_file_no_text_and_no_model_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not there"):
        read(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as text"):
        read(tmp_path / "bytes.yaml")
    (tmp_path / "bare.yaml").write_text("base_model:\nadapter: lora\n")
    with pytest.raises(InputError, match="names no base_model"):
        read(tmp_path / "bare.yaml")
    with pytest.raises(InputError, match="the command names no model"):
        read(["swift", "sft", "--model", "--tuner_type", "full"])


SEEING = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 98,
    "text_config": {**tiny.LLAMA, "vocab_size": 99},
    "vision_config": tiny.CLIP_VISION,
}
OF_IMAGES = {
    "axolotl": "base_model: {model}\nsequence_len: 32\nadapter: lora\nlora_r: 8\nprocessor_type: AutoProcessor\n"
    "lora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|q|v|o)_proj'\n",
    "llamafactory": "model_name_or_path: {model}\ncutoff_len: 32\nfinetuning_type: lora\nlora_rank: 8\n"
    "image_max_pixels: 784\n",
}


@pytest.mark.parametrize("tool", OF_IMAGES)
def test_files_of_images_train_what_reads_texts(tool: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING))
    path = tmp_path / "file.yaml"
    path.write_text(OF_IMAGES[tool].format(model=tmp_path))
    found = read(path)
    assert found.workload.task == "image-text-to-text"
    assert found.before.targets
    assert all("vision" not in name for name in found.before.targets)
    assert str(found.before.config.lora_targets) != "all-linear"
    assert any("an image and text" in note for note in found.notes)


def test_of_a_model_that_sees_what_reads_texts_is_trained_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING))
    path = tmp_path / "file.yaml"
    text = "model_name_or_path: {}\ncutoff_len: 32\nfinetuning_type: full\nimage_max_pixels: 784\n"
    path.write_text(text.format(tmp_path))
    found = read(path)
    assert found.workload.source["parts"] == ["model.language_model", "lm_head"]
    assert any("the rest stays as it is" in note for note in found.notes)


def test_what_a_file_freezes_stays_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unfollowed(monkeypatch)
    path = written(tmp_path, "unfrozen_parameters:\n  - model.layers.1.\n  - lm_head")
    text = path.read_text()
    whole = [line for line in text.splitlines() if not line.startswith(("adapter", "lora"))]
    path.write_text("\n".join(whole))
    tuned = autofit.tune(path, gpu="rtx-4090")
    assert tuned.before and tuned.after
    assert "gradient_checkpointing" not in tuned.changes  # gradients flow to the inputs beside it

    path.write_text("\n".join(line for line in whole if line[:2] not in ("un", "  ")))
    found = read(path)
    workload = dataclasses.replace(
        found.workload, effective_batch_size=found.before.effective_batch_size
    )
    trains_all = predict(workload, dict(found.before.config), gpu="rtx-4090").estimate
    assert tuned.before.breakdown["optimizer"] < 0.7 * trains_all.breakdown["optimizer"]

    script = (tmp_path / str(tuned.result.files["script"])).read_text()
    assert '"model.layers.1",' in script
    assert tuned.result.source["asks_inputs"] is True


def test_experts_that_are_named_get_adapters_beside_the_layers(tmp_path: Path) -> None:
    path = written(tmp_path, "lora_target_parameters: [experts.down_proj, experts.up]")
    config: Any = tiny.mixture_workload("qwen3_moe").model
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**config.config, "architectures": ["Qwen3MoeForCausalLM"]})
    )
    found = read(path)
    assert found.before.config.lora_targets == "all-linear+experts.down_proj"
    assert found.before.adapted_experts == ("down_proj",)
    assert any("no layers named experts.up" in note for note in found.notes)


def test_a_file_of_trl_that_names_no_layers_adapts_those_that_peft_does(tmp_path: Path) -> None:
    path = written(tmp_path)
    keys = {"model_name_or_path": str(tmp_path / "model"), "max_length": 32, "use_peft": True}
    for further, targets in (
        ({}, "q_proj+v_proj"),
        ({"lora_target_modules": ["k_proj"]}, "k_proj"),
        ({"lora_target_modules": "all-linear"}, "all-linear"),
    ):
        path.write_text(json.dumps({**keys, **further}))
        assert read(path).before.config.lora_targets == targets


def test_names_without_a_layer_are_noted(tmp_path: Path) -> None:
    path = written(tmp_path)
    text = path.read_text().replace(
        "lora_target_linear: true", "lora_target_modules: [q_proj, Wqkv]"
    )
    path.write_text(text)
    found = read(path)
    assert found.before.config.lora_targets == "q_proj"
    assert any("no layers named Wqkv" in note for note in found.notes)


def test_what_no_combination_may_break_in_a_tool(tmp_path: Path) -> None:
    rules = searched_workload(read(written(tmp_path))).rules
    off = {technique.name: technique.off for technique in all_techniques()}

    # It has no keys for a number of blocks.
    checkpointing = rules["axolotl: activation_checkpointing"]
    streaming = rules["axolotl: parameter_offload"]
    for value in ("none", "full", "full:2"):
        said = checkpointing(Config({**off, "activation_checkpointing": value}))
        assert bool(said) == (value == "full:2")
    adapted = Config({**off, "lora_rank": 8, "lora_targets": "all-linear"})
    for value in ("none", "cpu", "cpu:3"):
        said = streaming(adapted.replace(parameter_offload=value))
        assert bool(said) == (value == "cpu:3")

    rule = rules["axolotl: activation_offload"]
    alone = Config({**off, "activation_offload": "cpu"})
    assert "offloads with activation checkpointing only" in rule(alone)
    assert rule(alone.replace(activation_checkpointing="full")) is None
    assert rule(Config(off)) is None
    pickle.dumps(rules)  # for the processes that measure
