"""What an exporter writes its importer reads back; files as people write them are read, or refused."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.knobs.lora_alpha import USUAL_ALPHA
from autofit.core.tasks import TASK_NAMES, TASKS
from autofit.export.importers import IMPORTERS, importer_of
from autofit.export.importers.division import Division
from autofit.export.importers.document import flat
from autofit.export.importers.importer import Importer, changes, config_of
from autofit.export.importers.known_keys import known_keys, note_on_unknown
from autofit.export.source import ExportSource
from autofit.export.tool import write
from autofit.export.tools.axolotl import SAVED
from autofit.models.tiled_mlp import TiledMlp
from autofit.techniques import all_techniques
from tests.export.sources import LINEAR, LORA, OFF, SIZES, source

CHOICES = {
    technique.name: tuple(dict.fromkeys((technique.off, *technique.values)))
    for technique in all_techniques()
    if technique.values and technique.name not in SIZES
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"precision": "bf16-mixed", "activation_checkpointing": "full"},
    "fp32": {"precision": "fp32", "optimizer": "adamw-foreach"},
    "lora": {**LORA, "precision": "bf16-mixed", "lora_dropout": 0.05, "lora_alpha": 16},
    "qlora": {
        **LORA,
        "precision": "bf16-mixed",
        "quantization": "nf4-dq",
        "optimizer": "paged-adamw-8bit",
        "activation_checkpointing": "full",
    },
    "liger": {**LORA, "precision": "bf16-mixed", "kernels": "liger", "attention": "flash"},
    "compiled": {"precision": "bf16-mixed", "compile": "default"},
}


def named(**knobs: Any) -> ExportSource:
    found = source(**knobs)
    return replace(found, targets=LINEAR, versions={**found.versions, "flash-attn": "2.8"})


def read(importer: Importer, keys: dict[str, Any]) -> Config:
    beginning = replace(named(), config=Config({**OFF, **dict.fromkeys(SIZES, 1)}))
    return config_of(importer, keys, beginning, CHOICES, Division())


# Adapters of transformers are its script's.
WRITTEN = [
    pytest.param(importer, case, id=f"{importer.tool.name}-{case}")
    for importer in IMPORTERS
    if importer.pictures is None
    for case, knobs in CASES.items()
    if not (importer.section and knobs.get("lora_rank"))
]


@pytest.mark.parametrize(("importer", "case"), WRITTEN)
def test_what_is_written_is_read_back(importer: Importer, case: str) -> None:
    exported = named(**CASES[case])
    made = write(importer.tool, exported)
    text = next(iter(made.files.values()))
    keys = flat(yaml.safe_load(text))
    assert importer_of(keys, "file.yaml") is importer
    assert note_on_unknown(importer.tool.name, keys) is None
    found = read(importer, keys)

    deviating = {departure.knob for departure in made.departures}
    of_names = {"lora_targets"} if CASES[case].get("lora_rank") else set()
    for knob, value in exported.config.items():
        if knob in importer.tool.knobs and knob not in deviating | of_names:
            usual = {None, 0.0, USUAL_ALPHA}
            assert found[knob] == value or {found[knob], value} <= usual, knob
    if of_names:
        assert found["lora_targets"] in ("+".join(LINEAR), "all-linear")

    again = replace(exported, config=found.replace(lora_targets=exported.config.lora_targets))
    assert changes(importer, keys, exported, again, set(found) - deviating) == {}


AXOLOTL: dict[str, Any] = {
    "base_model": "some/model",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": "auto",
    "tf32": True,  # of what is not in 16 bits
    "gradient_checkpointing": True,
    "attn_implementation": "flash_attention_2",
    "optimizer": "adamw_bnb_8bit",
}
LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "some/model",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "q_proj,v_proj",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "bf16": True,
}
TRL: dict[str, Any] = {
    "model_name_or_path": "some/model",
    "use_peft": True,
    "gradient_checkpointing": True,
    "per_device_train_batch_size": 4,
    "torch_dtype": "bfloat16",
    "bf16": True,
}
SWIFT: dict[str, Any] = {
    "model": "some/model",
    "tuner_type": "lora",
    "torch_dtype": "bfloat16",
    "lora_rank": 8,
    "target_modules": "all-linear",
    "per_device_train_batch_size": 2,
    "attn_impl": "flash_attention_2",
}


def test_files_are_read_as_people_write_them() -> None:
    found = read(importer_of(AXOLOTL, "a"), AXOLOTL)
    assert (found.lora_rank, found.lora_alpha, found.lora_targets) == (32, 16, "all-linear")
    assert found.quantization in ("nf4", "nf4-dq")
    assert (found.precision, found.optimizer, found.attention) == (
        "bf16-mixed",
        "adamw-8bit",
        "flash",
    )
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (2, 4)
    assert found.activation_checkpointing == "full"

    found = read(importer_of(LLAMA_FACTORY, "b"), LLAMA_FACTORY)
    assert (found.lora_rank, found.lora_targets) == (8, "q_proj+v_proj")
    assert found.activation_checkpointing == "full"  # unless it is disabled
    assert found.precision == "bf16-mixed"
    assert found.gradient_accumulation_steps == 8

    found = read(importer_of(TRL, "c"), TRL)
    assert (found.lora_rank, found.activation_checkpointing) == (16, "full")
    assert found.micro_batch_size == 4

    found = read(importer_of(SWIFT, "d"), SWIFT)
    assert (found.lora_rank, found.lora_alpha, found.lora_dropout) == (8, 32, 0.05)
    assert (found.precision, found.attention) == ("bf16-mixed", "flash")
    assert found.gradient_accumulation_steps == 8  # of 16 samples a step
    assert found.activation_checkpointing == "full"


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({"tuner_type": "full"}, "bf16"),
        ({"train_type": "full", "torch_dtype": "float32", "fp16": False}, "fp32"),
        ({"tuner_type": "full", "torch_dtype": "float32"}, "fp16-mixed"),
        ({"tuner_type": "lora", "lora_dtype": "bfloat16"}, "bf16"),
        ({"tuner_type": "lora"}, "bf16-mixed"),
    ],
)
def test_what_ms_swift_makes_of_precisions(keys: dict[str, Any], precision: str) -> None:
    assert read(importer_of(keys, "d"), keys).precision == precision


def test_the_command_says_what_is_trained() -> None:
    for command, task in {
        "swift rlhf": "dpo",
        "swift sft": "causal-lm",
        "trl kto": "kto",
        "trl sft": "causal-lm",
    }.items():
        keys = {"launcher.command": command}
        assert importer_of(keys, "a").task(keys) == task
    for keys, task in (
        ({"rlhf_type": "orpo"}, "orpo"),
        ({"tuner_type": "lora", "task_type": "seq_cls"}, "sequence-classification"),
        ({"tuner_type": "full", "task_type": "reranker"}, "rerank"),
        ({"tuner_type": "full", "task_type": "generative_reranker"}, "generative-rerank"),
    ):
        assert importer_of(keys, "a").task(keys) == task


def test_arguments_of_scripts_of_transformers_are_not_taken_for_trls() -> None:
    """Both name the model by one key, and TRL trains in bfloat16 where nothing is said."""
    common = {"model_name_or_path": "some/model", "per_device_train_batch_size": 2}
    assert importer_of(common, "a").tool.name == "trl"

    keys = {**common, "block_size": 512, "torch_dtype": "auto"}
    importer = importer_of(keys, "a")
    assert importer.tool.name == "transformers"
    assert importer.sample_tokens(keys) == 512
    assert read(importer, keys).precision == "bf16"
    assert read(importer, {**common, "train_file": "rows.jsonl"}).precision == "fp32"


def test_what_fsdp_does_besides_stays_in_files_of_transformers() -> None:
    keys: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config.fsdp_version": 2,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.activation_checkpointing": True,
    }
    importer = importer_of(keys, "a")
    division = replace(importer.divide(keys, Path()), devices=2)
    assert division.only == {"activation_checkpointing": ("full", "none")}

    source = replace(named(), hardware={"device": "cuda", "devices": 2}, effective_batch_size=None)
    config = config_of(importer, keys, source, CHOICES, division)
    before = replace(source, config=config)
    other = {"activation_checkpointing": "none", "reshard_after_forward": False}
    after = replace(before, config=config.replace(**other))
    assert changes(importer, keys, before, after, set(other)) == {
        "fsdp_config.activation_checkpointing": False,
        "fsdp_config.reshard_after_forward": False,
    }


def test_older_names_of_keys_stay_as_they_are() -> None:
    importer = importer_of(TRL, "c")
    before = replace(named(), config=read(importer, TRL), effective_batch_size=4)
    after = replace(before, config=before.config.replace(activation_checkpointing="none"))
    changed = changes(importer, TRL, before, after, set(before.config))
    assert changed["gradient_checkpointing"] is False
    assert "activation_checkpointing" not in changed


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({**AXOLOTL, "rl": "grpo"}, "rl: grpo is not tuned"),
        ({**AXOLOTL, "gradient_accumulation_steps": 2, "batch_size": 4}, "takes one of them"),
        ({**AXOLOTL, "expert_parallel_size": 2}, "experts on devices of their own"),
        ({**AXOLOTL, "plugins": ["other.Plugin"]}, "plugins: other.Plugin is not known"),
        ({**LLAMA_FACTORY, "finetuning_type": "oft"}, "finetuning_type: oft"),
        ({**SWIFT, "tuner_type": "reft"}, "tuner_type: reft is not known"),
        ({**SWIFT, "rlhf_type": "grpo"}, "rlhf_type: grpo is not tuned"),
        ({"launcher.command": "megatron sft"}, "Megatron"),
        ({**TRL, "use_vllm": True}, "autofit estimate --task grpo"),
    ],
)
def test_what_cannot_be_tuned_says_why(keys: dict[str, Any], reason: str) -> None:
    assert reason in str(importer_of(keys, "file").refuse(keys))


def test_weights_of_experts_are_read_beside_the_layers() -> None:
    importer = importer_of(AXOLOTL, "file")
    assert importer.adapted_experts(AXOLOTL) == ()
    for given in (["experts.down_proj"], "experts.down_proj"):
        keys = {**AXOLOTL, "lora_target_parameters": given}
        assert importer.adapted_experts(keys) == ("experts.down_proj",)


def test_a_file_of_nobody_or_of_two_and_a_strange_value_are_told() -> None:
    with pytest.raises(InputError, match=r"is no file of sd-scripts, .*axolotl"):
        importer_of({"lr": 1}, "x.yaml")
    with pytest.raises(InputError, match="has keys of axolotl and of LLaMA-Factory"):
        importer_of({**AXOLOTL, **LLAMA_FACTORY}, "x.yaml")
    strange = {**AXOLOTL, "optimizer": "galore_adamw"}
    with pytest.raises(InputError, match="optimizer: 'galore_adamw' is nothing that autofit knows"):
        read(importer_of(strange, "x.yaml"), strange)
    with pytest.raises(InputError, match="lora_r must be a number"):
        read(importer_of(AXOLOTL, "x"), {**AXOLOTL, "lora_r": "many"})


def test_keys_that_a_tool_does_not_know_are_named() -> None:
    assert note_on_unknown("axolotl", AXOLOTL) is None
    nested = {"fsdp_config.anything": True, "datasets": []}
    assert note_on_unknown("axolotl", nested) is None
    version, known = known_keys("llamafactory")
    assert "finetuning_type" in known
    assert note_on_unknown("llamafactory", {"finetuning_typ": "lora", "cutoff_len": 1}) == (
        f"{version} does not know the key finetuning_typ (finetuning_type?); it stays as it is."
    )
    started = {"ENV.NPROC_PER_NODE": 2, "launcher.nnodes": 1, "qqq": 1, "zzz.a": 1, "zzz.b": 2}
    version, _ = known_keys("msswift")
    assert note_on_unknown("msswift", started) == (
        f"{version} does not know the keys qqq, zzz; they stay as they are."
    )


ODD: tuple[Any, ...] = (
    None,
    [],
    {},
    [1],
    {"a": 1},
    -1,
    1.5,
    "x",
    "",
    True,
    10**30,
    float("nan"),
    "$B",
)
ASKED = (
    *("deepspeed", "fsdp", "fsdp_config", "rl", "stage", "accelerate_config", "plugins", "optim"),
    *("optimizer", "task_type", "rlhf_type", "adapter", "lora_dtype", "torch_dtype", "dtype"),
    *("num_processes", "dp_shard_size", "target_modules", "target_regex", "lora_target_modules"),
    *("gradient_checkpointing_kwargs", "gradient_accumulation_steps", "processor_type"),
    *("launcher.config_file", "ENV.NPROC_PER_NODE", "ENV.NNODES", "max_length", "quant_bits"),
)


@pytest.mark.parametrize("base", [AXOLOTL, LLAMA_FACTORY, TRL, SWIFT], ids=["a", "f", "t", "s"])
def test_values_of_a_wrong_kind_are_told_or_passed_over(
    base: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever stands in a file, one sentence is said of it, or it is read."""
    importer = importer_of(base, "file.yaml")
    for key in {**base, **dict.fromkeys(ASKED)}:
        for odd in ODD:
            keys = flat({**base, key: odd})
            with contextlib.suppress(InputError):
                importer.check(keys)
                if importer.refuse(keys) is None:
                    assert importer.task(keys) in TASK_NAMES
                    importer.sample_tokens(keys)
                    importer.divide(keys, tmp_path)
                    read(importer, keys)


def test_ms_swift_takes_sixteen_samples_a_step_on_all_devices() -> None:
    def accumulation(division: Division) -> Any:
        return importer_of(SWIFT, "a").read(SWIFT, division)["gradient_accumulation_steps"]

    assert accumulation(Division()) == 8
    assert accumulation(Division(devices=4)) == 2
    assert accumulation(Division(devices=4, nodes=4)) == 1


def test_what_a_file_asks_for_besides_is_noted(tmp_path: Path) -> None:
    begun = {**AXOLOTL, "peft.loftq_config.loftq_bits": 4}
    importer = importer_of(begun, "a")
    assert importer.refuse(begun) is None
    assert "LoftQ" in importer.notes(begun)[0]
    kernels = {"plugins": ["axolotl.integrations.kernels.KernelsPlugin"], "use_scattermoe": True}
    assert importer.refuse({**AXOLOTL, **kernels}) is None
    assert "less memory than predicted" in importer.notes({**AXOLOTL, **kernels})[0]
    assert "experts" in str(importer.refuse({**AXOLOTL, **kernels, "use_sonicmoe": True}))
    assert importer.notes(AXOLOTL) == ()

    by_ray = {**LLAMA_FACTORY, "ray_num_workers": 4}
    division = importer_of(by_ray, "b").divide(by_ray, tmp_path)
    assert division.devices == 4
    assert "on one machine" in division.notes[0]


def test_files_about_images_say_so() -> None:
    for keys, sees in (
        ({**SWIFT, "rlhf_type": "dpo", "ENV.MAX_PIXELS": 1000}, True),
        ({**SWIFT, "rlhf_type": "dpo"}, False),
        ({**LLAMA_FACTORY, "stage": "kto", "image_max_pixels": 1000}, True),
    ):
        importer = importer_of(keys, "file")
        assert importer.refuse(keys) is None
        assert importer.sees(keys) is sees
        assert importer.task(keys) in ("dpo", "kto")
    for more, task in (
        ({"rlhf_type": "rm"}, "reward"),
        ({"task_type": "seq_cls"}, "sequence-classification"),
        ({"task_type": "reranker"}, "rerank"),
    ):
        keys = {**SWIFT, **more, "ENV.MAX_PIXELS": 1000}
        assert importer_of(keys, "file").refuse(keys) is None
        assert importer_of(keys, "file").task(keys) == task
    keys = {**SWIFT, "task_type": "decision", "ENV.MAX_PIXELS": 1000}
    assert "decision" in str(importer_of(keys, "file").refuse(keys))


def test_ms_swift_reads_several_passages_for_each_query() -> None:
    def samples(**keys: Any) -> Mapping[str, Any]:
        found = {**SWIFT, **keys}
        importer = importer_of(found, "file")
        assert importer.refuse(found) is None
        return importer.fields(found, TASKS[importer.task(found)], {})

    kind = {"task_type": "generative_reranker", "loss_type": "listwise_reranker"}
    assert samples(**kind) == {"texts": 8}
    fewer = {"ENV.MAX_NEGATIVE_SAMPLES": 1, "ENV.MAX_POSITIVE_SAMPLES": 2}
    assert samples(task_type="reranker", **fewer) == {"texts": 4}
    assert samples(task_type="seq_cls", num_labels=265) == {"options": {"num_labels": 265}}
    assert samples(task_type="seq_cls", num_labels="<n>") == {}
    assert samples(rlhf_type="rm") == {}

    importer = importer_of(SWIFT, "file")
    ranker = TASKS["generative-rerank"]
    assert importer.loss_options({**SWIFT, **kind}, ranker) == {"kind": "listwise"}
    assert importer.loss_options({**SWIFT, "beta": 0.2}, TASKS["dpo"]) == {"beta": 0.2}
    wrong = {**SWIFT, **kind, "ENV.MAX_NEGATIVE_SAMPLES": "many"}
    with pytest.raises(InputError, match="MAX_NEGATIVE_SAMPLES must be a whole number"):
        importer.fields(wrong, TASKS["rerank"], {})
    assert "loss_type: other" in str(importer.refuse({**SWIFT, **kind, "loss_type": "other"}))
    assert "with 8 passages" in importer.notes({**SWIFT, **kind})[0]
    assert "on top of what" in importer.notes({**SWIFT, "model": "BAAI/Emu3-Gen"})[0]
    begun = {**SWIFT, "init_weights": "lora-ga"}
    assert importer.refuse(begun) is None
    assert "begin with gradients" in importer.notes(begun)[0]
    assert "two classes" in importer.notes({**SWIFT, "num_labels": "<n>"})[0]


def test_embeddings_of_ms_swift_are_told_apart_in_their_micro_batch() -> None:
    keys = {**SWIFT, "task_type": "embedding", "loss_type": "infonce"}
    importer = importer_of(keys, "file")
    assert importer.refuse(keys) is None
    assert importer.task(keys) == "embed"
    assert importer.fields(keys, TASKS["embed"], {}) == {"texts": 2, "head": "passing"}
    harder = {**keys, "ENV.INFONCE_HARD_NEGATIVES": 3, "ENV.MAX_PIXELS": 1000}
    assert importer.refuse(harder) is None
    assert importer.fields(harder, TASKS["embed"], {})["texts"] == 5
    assert importer.tool.name in TASKS["embed"].by_micro_batch
    assert importer.keeps(SWIFT) == ()
    assert "loss_type: other" in str(importer.refuse({**keys, "loss_type": "other"}))


def test_axolotl_rewards_steps_by_classes_of_tokens() -> None:
    keys = {**AXOLOTL, "process_reward_model": True}
    importer = importer_of(keys, "file")
    assert importer.refuse(keys) is None
    assert importer.task(keys) == "token-classification"
    task = TASKS["token-classification"]
    assert importer.fields(keys, task, {}) == {"options": {"num_labels": 2}}
    assert importer.fields({**keys, "num_labels": 3}, task, {})["options"] == {"num_labels": 3}
    with pytest.raises(InputError, match="num_labels must be a positive"):
        importer.fields({**keys, "num_labels": "x"}, task, {})


def test_tiled_layers_of_axolotl() -> None:
    keys = {**AXOLOTL, "tiled_mlp": True, "activation_offloading": "legacy"}
    importer = importer_of(keys, "file")
    assert importer.refuse(keys) is None
    task = TASKS["causal-lm"]
    assert importer.fields(keys, task, {}) == {"tiles": TiledMlp()}
    assert importer.fields({**keys, "tiled_mlp_num_shards": 4}, task, {}) == {"tiles": TiledMlp(4)}
    compiles, copies = importer.notes(keys)
    assert "compiles tiled MLPs" in compiles and "copies between" in copies
    assert len(importer.notes({**keys, "tiled_mlp_use_original_mlp": True})) == 1
    assert "Liger's MLPs" in str(importer.refuse({**keys, "liger_glu_activation": True}))
    with pytest.raises(InputError, match="tiled_mlp_num_shards must be a positive"):
        importer.fields({**keys, "tiled_mlp_num_shards": "x"}, task, {})


def test_torchaos_adamw_of_axolotl_has_as_large_a_state() -> None:
    for name in ("adamw_torch_8bit", "ao_adamw_8bit"):
        keys = {**AXOLOTL, "optimizer": name}
        importer = importer_of(keys, "file")
        assert read(importer, keys).optimizer == "adamw-8bit"
        assert "torchao's AdamW" in importer.notes(keys)[0]
    rounding = {**AXOLOTL, "optimizer": name, "optim_args": "bf16_stochastic_round=True"}
    assert importer.notes(rounding) == ()


def test_heads_too_large_for_flash_attention_are_computed_otherwise() -> None:
    keys = {**AXOLOTL, "attn_implementation": "flash_attention_2", "sample_packing": False}
    importer = importer_of(keys, "file")
    assert read(importer, keys).attention == "flash"
    assert importer.keeps(keys) == ()
    two = {**keys, "gemma4_hybrid_attn_impl": True}
    assert read(importer, two).attention == "sdpa"
    assert importer.keeps(two) == ("attn_implementation",)
    assert "too large for flash attention" in importer.notes(two)[0]


def test_what_axolotl_does_without_a_key() -> None:
    cut = {**AXOLOTL, "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}
    assert read(importer_of(cut, "a"), cut).loss == "chunked"
    off = {**cut, "cut_cross_entropy": False}
    assert read(importer_of(off, "a"), off).loss == "standard"
    older = {name: value for name, value in AXOLOTL.items() if name != "attn_implementation"}
    for name, value in {"flash_attention": "flash", "eager_attention": "eager"}.items():
        keys = {**older, name: True}
        assert read(importer_of(keys, "a"), keys).attention == value


@pytest.mark.parametrize(
    ("batch", "micro_batch", "after", "expected"),
    [
        (8, 1, (4, 2), {"micro_batch_size": 4}),
        (8, 4, (8, 1), {"micro_batch_size": 8}),
        (5, 2, (1, 4), {"micro_batch_size": 1, "batch_size": 4}),  # which trains 4 samples a step
        (5, 2, (2, 2), {}),
    ],
)
def test_axolotl_works_accumulation_out_of_a_batch(
    batch: int, micro_batch: int, after: tuple[int, int], expected: dict[str, int]
) -> None:
    """A file that says the samples of a step says nothing of accumulation, before and after."""
    keys = {name: value for name, value in AXOLOTL.items() if name != "gradient_accumulation_steps"}
    keys |= {"batch_size": batch, "micro_batch_size": micro_batch}
    importer = importer_of(keys, "a")
    in_step = micro_batch * (batch // micro_batch)
    before = replace(named(), config=read(importer, keys), effective_batch_size=in_step)
    assert before.config.micro_batch_size == micro_batch
    assert before.config.gradient_accumulation_steps == batch // micro_batch

    knobs = dict(zip(("micro_batch_size", "gradient_accumulation_steps"), after, strict=True))
    tuned = replace(before, config=before.config.replace(**knobs))
    assert changes(importer, keys, before, tuned, set(knobs)) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {}),
        ({"activation_offloading": True}, {"activation_offloading": "hidden_states"}),
        ({"activation_offloading": "hidden_states"}, {}),
        (
            {"gradient_checkpointing_kwargs.use_reentrant": True},
            {"gradient_checkpointing_kwargs.use_reentrant": False},
        ),
    ],
)
def test_what_axolotl_refuses_beside_selective_checkpointing_changes_with_it(
    said: dict[str, Any], expected: dict[str, Any]
) -> None:
    keys = {**AXOLOTL, "gradient_checkpointing": True, **said}
    importer = importer_of(keys, "a")
    selective = {"selective_checkpointing": {"save": ["attention"]}}
    assert importer.written(keys, selective, {}) == selective | expected
    assert importer.written(keys, {"bf16": True}, {}) == {"bf16": True}


def test_selective_checkpointing_of_axolotl_goes_or_stays() -> None:
    """One that saves what autofit's does may go; of any other checkpoints stay."""
    full = {**AXOLOTL, "adapter": None, "gradient_checkpointing": True}
    ours = full | {"selective_checkpointing.save": SAVED}
    importer = importer_of(ours, "a")
    assert importer.keeps(ours) == ()
    assert importer.written(ours, {}, {"gradient_checkpointing": False}) == {
        "selective_checkpointing": False
    }
    assert importer.written(ours, {}, {"selective_checkpointing": {"save": SAVED}}) == {}

    for said in (
        {"selective_checkpointing": True},
        {"selective_checkpointing.save": ["attention"]},
    ):
        other = full | said
        assert importer.keeps(other) == ("gradient_checkpointing",)
        assert "is predicted as full checkpointing" in importer.notes(other)[0]


def test_rewards_of_llama_factory_are_of_a_value_head() -> None:
    keys = {**LLAMA_FACTORY, "stage": "rm"}
    importer = importer_of(keys, "file")
    assert importer.refuse(keys) is None
    assert importer.task(keys) == "reward"
    assert importer.fields(keys, TASKS["reward"], {}) == {"head": "values"}
    assert importer.fields(LLAMA_FACTORY, TASKS["causal-lm"], {}) == {}


def test_under_deepspeed_trained_weights_of_ms_swift_are_in_float32(tmp_path: Path) -> None:
    keys = {"tuner_type": "full", "deepspeed": "zero3", "ENV.NPROC_PER_NODE": 2}
    importer = importer_of(keys, "d")
    beginning = replace(named(), config=Config({**OFF, **dict.fromkeys(SIZES, 1)}))
    division = importer.divide(keys, tmp_path)
    assert config_of(importer, keys, beginning, CHOICES, division).precision == "bf16-mixed"
    assert config_of(importer, keys, beginning, CHOICES, Division()).precision == "bf16"


def test_how_ms_swift_divides_over_devices(tmp_path: Path) -> None:
    def divided(**more: Any) -> Division:
        keys = {**SWIFT, **more}
        return importer_of(keys, "a").divide(keys, tmp_path)

    by_zero = divided(deepspeed="zero3_offload", **{"ENV.NPROC_PER_NODE": 4})
    assert by_zero.devices == 4
    assert (by_zero.knobs["data_parallel"], by_zero.knobs["fsdp_offload"]) == ("fsdp", "cpu")

    by_name = divided(fsdp="fsdp2")
    assert by_name.devices is None
    assert by_name.knobs["activation_checkpointing"] == "full"  # its own
    assert not by_name.open

    inside = {"fsdp.fsdp": "full_shard", "fsdp.fsdp_config.reshard_after_forward": False}
    assert divided(**inside).knobs["reshard_after_forward"] is False
    assert not divided().knobs
    assert divided(**{"ENV.NNODES": 2}).nodes == 2
    split = {"sequence_parallel_size": 2, "deepspeed": "zero3"}
    assert divided(**split).knobs["context_parallel"] == 2
    with pytest.raises(InputError, match="sequence_parallel_size: without FSDP or ZeRO-3"):
        divided(sequence_parallel_size=2)
    launched = {"launcher.num_processes": 8, "launcher.num_machines": 2}
    assert divided(**launched).devices == 4  # of each
    assert divided(**{"launcher.nnodes": "$WORLD_SIZE"}).nodes is None  # the machine knows
