"""Files of axolotl."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, shown
from autofit.core.task import Task
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.tasks.token_classification import TOKEN_CLASSIFICATION
from autofit.export.importers.accelerate import divided_by_trainer
from autofit.export.importers.division import Division
from autofit.export.importers.frozen import (
    BY_CHECKPOINTING,
    Trained,
    Weights,
    list_of_words,
    pattern_of,
)
from autofit.export.importers.fsdp import DEFAULTS, FIRST
from autofit.export.importers.importer import Importer, Keys, refused_key, task_of_keys
from autofit.export.tools.axolotl import SAVED, TOOL
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.tiled_mlp import TiledMlp

_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "optimizer": "adamw_torch_fused",
    "attn_implementation": "sdpa",
    "peft_autocast_adapter_dtype": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile_mode": "default",
}
_OTHER_NAMES = {
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw_hf": "adamw_torch",
    "paged_adamw": "paged_adamw_32bit",
    "adamw_torch_4bit": "ao_adamw_4bit",
}
_REFUSED = {
    "vllm": "it generates with a server of its own, which is not tuned",
    "gptq": "its weights are quantised already",
    "use_sonicmoe": "its kernels for experts are not known",
    "relora": "restarts of adapters are not known",
    "ebft": "this kind of training is not known",
    "lisa_n_layers": "training some layers at a time is not known",
}
_SIZES = {
    "dp_replicate_size": "data_parallel_replicate",
    "dp_shard_size": "data_parallel_shard",
    "tensor_parallel_size": "tensor_parallel",
    "context_parallel_size": "context_parallel",
}
_TWO_KERNELS = "gemma4_hybrid_attn_impl"
_LIKE_FLASH = (
    "flash_attention",
    "kernels-",
    "flex_attention",
)  # save as much for the backward
_ROWS = re.compile(r"^(.+)\[[0-9]*(?::[0-9]*)?\]$")  # behind a pattern: of a weight
_CUT, _CUT_PLUGIN = "cut_cross_entropy", "CutCrossEntropyPlugin"
# What attention was asked for by, and is in all that axolotl still takes.
_OLDER_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
_UNFROZEN = "unfrozen_parameters"
# What modules of images and sounds are called, and what brings them to texts.
_MEDIA = {
    *("vision_tower", "vision_model", "vision_encoder", "embed_vision", "visual"),
    *("multi_modal_projector", "audio_tower", "audio_model", "embed_audio"),
}
_EMBEDDINGS = ("lm_head", "embed_tokens")  # beside these gradients are asked of what they give
# The third brings kernels for experts; the last one watches.
_PLUGINS = ("LigerPlugin", _CUT_PLUGIN, "KernelsPlugin", "SwanLabPlugin")
_TILES = "tiled_mlp"
# Of the last, which a file has instead of the second, axolotl works the accumulation out.
_MICRO, _ACCUMULATION, _BATCH = "micro_batch_size", "gradient_accumulation_steps", "batch_size"
_SELECTIVE, _OFFLOADING = "selective_checkpointing", "activation_offloading"
_REENTRANT = "gradient_checkpointing_kwargs.use_reentrant"
_LEGACY = "legacy"
_ADAPTERS = (None, "", "lora", "qlora")

# Its files are read of images and of rewards for steps, too; how they are written anew is not
# known.
_TASKS = (*TOOL.tasks, IMAGE_TEXT_TO_TEXT.name, TOKEN_CLASSIFICATION.name)
_STEPS = "process_reward_model"  # a class at the end of each step: two of them, as TRL's PRMTrainer


def _task(keys: Keys) -> str:
    if keys.get(_STEPS):
        return TOKEN_CLASSIFICATION.name
    if keys.get("reward_model"):
        wanted: dict[str, Any] = {"reward_model": True}
    elif keys.get("rl"):
        wanted = {"rl": keys["rl"]}
    elif keys.get("processor_type"):
        return IMAGE_TEXT_TO_TEXT.name
    else:
        return CAUSAL_LM.name

    return task_of_keys(TOOL.name, wanted)


def _refuse(keys: Keys) -> str | None:
    if reason := refused_key(keys, _REFUSED):
        return reason
    if keys.get(_BATCH) is not None and keys.get(_ACCUMULATION) is not None:
        return f"{_BATCH} and {_ACCUMULATION}: axolotl takes one of them alone."
    if keys.get("expert_parallel_size") not in (None, 0, 1):
        return "expert_parallel_size: experts on devices of their own are not known."
    plugins = keys.get("plugins") or ()
    if not isinstance(plugins, list | tuple):
        return "plugins must be a list."
    for plugin in plugins:
        if not str(plugin).endswith(_PLUGINS):
            return f"plugins: {plugin} is not known."

    if keys.get(_TILES) and keys.get("liger_glu_activation"):
        return f"{_TILES}: Liger's MLPs in tiles are not predicted."
    if reason := _refused_rounding(keys):
        return reason
    if keys.get(_UNFROZEN) and keys.get("adapter"):
        return (
            "unfrozen_parameters: beside an adapter it freezes all that the patterns do not match, "
            "and names of adapters begin with base_model."
        )

    if keys.get("adapter") not in _ADAPTERS:
        return f"adapter: {keys['adapter']} is not known."
    if keys.get("processor_type") and _task(keys) != IMAGE_TEXT_TO_TEXT.name:
        return "processor_type: images are tuned for finetuning by completions alone."
    if keys.get("rl") and _task(keys) == CAUSAL_LM.name:
        return f"rl: {keys['rl']} is not tuned."

    return None


def _fields(keys: Keys, task: Task, config: Keys) -> dict[str, Any]:
    """How MLPs are tiled, and how many classes a step may have; all other tokens are left out of
    the loss, and not of the forward."""
    fields: dict[str, Any] = {}
    if keys.get(_TILES):
        key = f"{_TILES}_num_shards"
        count = keys.get(key)
        if count is not None:
            _check_positive(key, count)
        fields["tiles"] = TiledMlp(count)

    if task.classifies:
        classes = keys.get("num_labels") or 2
        _check_positive("num_labels", classes)
        fields["options"] = {"num_labels": classes}

    return fields


def _check_positive(key: str, value: Any) -> None:
    """Raise an InputError where a key says no positive whole number."""
    if not is_whole(value, 1):
        message = f"{key} must be a positive whole number, not {shown(value)}."
        raise InputError(message, "Correct it.")


def _trains(keys: Keys, weights: Weights) -> Trained | None:
    """What the patterns match, without what reads images and sounds where a key freezes that."""
    patterns = list_of_words(_UNFROZEN, keys.get(_UNFROZEN))
    freezes_media = bool(keys.get("freeze_mm_modules"))
    if not patterns and not freezes_media:
        return None

    names = set(weights.sizes)
    notes: list[str] = []
    if patterns:
        names, notes = _matched(patterns, weights)
    if freezes_media:
        names = {name for name in names if _MEDIA.isdisjoint(name.split("."))}

    asks_inputs = bool(keys.get("gradient_checkpointing"))
    for pattern in patterns:
        if any(word in pattern for word in _EMBEDDINGS):
            asks_inputs = True

    return Trained(names, asks_inputs, BY_CHECKPOINTING, tuple(notes))


def _matched(patterns: Sequence[str], weights: Weights) -> tuple[set[str], list[str]]:
    """The weights that patterns match, in which a dot is one, and notes on those that match none.

    Rows of a weight are trained as all of it is, and their gradients set to zero.
    """
    found: set[str] = set()
    notes = []
    for pattern in patterns:
        rows = _ROWS.match(pattern)
        name = pattern
        if rows:
            name = rows[1]

        dotted = re.sub(r"\.(?!\+)", r"\\.", name)
        expression = pattern_of(_UNFROZEN, dotted)
        matched = weights.matching(expression.match)
        if not matched:
            notes.append(f"{_UNFROZEN}: no weight of the model matches {pattern}.")
        found |= matched

    if not found:
        message = f"{_UNFROZEN}: no weight of the model matches."
        raise InputError(message, "Correct it, or give --model DIRECTORY.")

    return found, notes


def _rounds(keys: Keys) -> FakeQuantisation | None:
    """By `qat`: int4 weights, beside inputs as they are or in int8."""
    if keys.get("qat.weight_dtype") is None:
        return None

    size = keys.get("qat.group_size")
    if size is None:
        size = 128
    if not is_whole(size, 1):
        message = f"qat.group_size must be a whole number, not {shown(size)}."
        raise InputError(message, "Correct it.")

    is_cut = keys.get(_CUT, _has_plugin(keys, _CUT_PLUGIN))
    is_fused = is_cut or keys.get("liger_fused_linear_cross_entropy")
    return FakeQuantisation(
        size,
        of_inputs=keys.get("qat.activation_dtype") == "int8",
        of_head=not is_fused,
    )


def _refused_rounding(keys: Keys) -> str | None:
    """Why a training for quantised inference cannot be tuned, as a sentence; or None."""
    asked = [key for key in keys if key == "qat" or key.startswith("qat.")]
    if not asked or keys.get("qat") == {}:
        return None

    weights = keys.get("qat.weight_dtype")
    inputs = keys.get("qat.activation_dtype")
    if weights != "int4" or inputs not in (None, "int8"):
        return f"qat: {weights} weights beside {inputs} inputs are not known, int4 beside int8 are."
    if keys.get("qat.quantize_embedding"):
        return "qat.quantize_embedding: embeddings that round are not known."
    if keys.get("adapter"):
        return "qat: adapters beside layers that round are not known."

    return None


def _notes(keys: Keys) -> tuple[str, ...]:
    """On what is predicted otherwise; LoftQ changes values once, and nothing of a step."""
    notes = []
    if any(key.startswith("peft.loftq_config") for key in keys):
        notes.append(
            "adapters that begin with LoftQ are trained as others are: what finding them takes "
            "before training is not predicted."
        )

    if keys.get("attn_implementation") == "flex_attention":
        notes.append("flex_attention is predicted as flash attention, which saves the same.")
    if keys.get(_TWO_KERNELS):
        notes.append(
            f"{_TWO_KERNELS}: heads too large for flash attention are computed by PyTorch's own "
            "attention; all are predicted so."
        )

    if keys.get("use_scattermoe"):
        notes.append(
            "use_scattermoe: its kernels copy no inputs into the order of experts, as the predicted "
            "products do; it needs less memory than predicted."
        )

    if keys.get(_TILES) and not keys.get(f"{_TILES}_use_original_mlp"):
        notes.append("axolotl compiles tiled MLPs, which then need less memory than predicted.")
    if keys.get("activation_offloading") == _LEGACY:
        notes.append(
            "activation_offloading: legacy copies between the computations, which takes longer "
            "than predicted."
        )

    if _is_torchao_8bit(keys):
        notes.append(
            "torchao's AdamW in 8 bits is predicted as that of bitsandbytes, whose state is as "
            "large."
        )

    if _saves_others(keys):
        notes.append(
            f"{_SELECTIVE} is predicted as full checkpointing: what it saves takes more memory."
        )

    if keys.get("qat.fake_quant_after_n_steps"):
        notes.append("what is predicted is of steps in which layers round, not of those before.")

    return tuple(notes)


def _divide(keys: Keys, folder: Path) -> Division:
    """FSDP 1 unless the file says 2; without any, FSDP's keys may be added."""
    division = divided_by_trainer(
        keys,
        folder,
        version=1,
        by_config=True,
        sizes=_SIZES,
    )
    if not division.knobs and not keys.get("ddp"):
        return replace(division, open=("data_parallel",))

    has_8bit_state = "8bit" in str(keys.get("optimizer"))
    if _is_torchao_8bit(keys) or (has_8bit_state and FIRST in division.notes):
        return division.closed("fsdp_offload")  # axolotl refuses one beside the other

    return division


def _pattern(keys: Keys) -> str | None:
    """The layers that get adapters, where they are a text: peft takes that for a regular
    expression, and a list for names."""
    found = keys.get("lora_target_modules")
    if isinstance(found, str) and re.search(r"[^\w.,\s-]", found):
        return found
    return None


def _meaning(key: str, value: Any) -> Any:
    if key in ("bf16", "fp16") and value in ("auto", "full"):
        return key == "bf16"
    if key == "optimizer":
        return _OTHER_NAMES.get(value, value)
    if key == "attn_implementation" and str(value).startswith(_LIKE_FLASH):
        return "flash_attention_2"
    if key == "attn_implementation" and str(value).startswith("xformers"):
        return "sdpa"  # the same computation, in other kernels
    if key == "gradient_checkpointing":
        return bool(value)
    if key == "gradient_checkpointing_kwargs" and isinstance(value, dict):
        return {**value, "use_reentrant": False}
    if key == "activation_offloading" and value in (True, _LEGACY):
        return "hidden_states"
    if key == "torch_compile_mode" and value == "max-autotune":
        return "default"  # with options of its own

    return value


def _read(keys: Keys, _: Division) -> Keys:
    """The keys without what says nothing.

    TF32 says nothing of products that are computed in 16 bits; a plugin for a loss switches it on
    unless a key says otherwise; and attention had keys of its own before it had one for all.
    """
    read = dict(keys)
    if any(_meaning(name, keys.get(name)) for name in ("bf16", "fp16", "bfloat16")):
        read["tf32"] = False
    if _has_plugin(keys, _CUT_PLUGIN):
        read.setdefault(_CUT, True)
    if _is_torchao_8bit(keys):
        read["optimizer"] = "adamw_bnb_8bit"

    for name, value in _OLDER_ATTENTION.items():
        if keys.get(name) is True:
            read.setdefault("attn_implementation", value)
    if keys.get(_TWO_KERNELS):
        read["attn_implementation"] = "sdpa"

    batch = keys.get(_BATCH)
    micro_batch = keys.get(_MICRO)
    if batch is not None:
        _check_positive(_BATCH, batch)
        _check_positive(_MICRO, micro_batch)
        read[_ACCUMULATION] = max(1, batch // micro_batch)

    return read


def _written(keys: Keys, changed: Keys, written: Keys) -> Keys:
    """The changes beside what the file says in axolotl's other words, or axolotl refuses beside
    them."""
    found = dict(changed)
    if keys.get(_BATCH) is not None and not changed.keys().isdisjoint((_MICRO, _ACCUMULATION)):
        found.pop(_ACCUMULATION, None)  # which follows from the samples of a step
        batch = written[_MICRO] * written[_ACCUMULATION]
        if batch != keys[_BATCH]:
            found[_BATCH] = batch

    if keys.get(f"{_SELECTIVE}.save") == SAVED and _SELECTIVE not in written:
        found[_SELECTIVE] = False
    elif changed.get(_SELECTIVE):
        if keys.get(_OFFLOADING) in (True, _LEGACY):
            found.setdefault(_OFFLOADING, "hidden_states")
        if keys.get(_REENTRANT):
            found[_REENTRANT] = False

    return found


def _keeps(keys: Keys) -> tuple[str, ...]:
    """Packed samples see one another but with flash attention; and what is saved beside
    checkpoints, other than autofit does it, goes with them."""
    kept = []
    if keys.get("sample_packing") or keys.get(_TWO_KERNELS):
        kept.append("attn_implementation")
    if _saves_others(keys):
        kept.append("gradient_checkpointing")

    return tuple(kept)


def _saves_others(keys: Keys) -> bool:
    """Whether checkpoints are selective, and save something else than autofit's."""
    is_asked = any(name.split(".")[0] == _SELECTIVE and keys[name] for name in keys)
    return is_asked and keys.get(f"{_SELECTIVE}.save") != SAVED


def _is_torchao_8bit(keys: Keys) -> bool:
    """Whether it trains by torchao's AdamW in 8 bits, without stochastic rounding."""
    is_named = keys.get("optimizer") in ("adamw_torch_8bit", "ao_adamw_8bit")
    return is_named and "stochastic" not in str(keys.get("optim_args"))


def _has_plugin(keys: Keys, name: str) -> bool:
    """Whether a file asks for a plugin, by the end of its name."""
    plugins = keys.get("plugins")
    if not isinstance(plugins, list | tuple):
        return False
    return any(str(plugin).endswith(name) for plugin in plugins)


IMPORTER = Importer(
    tool=replace(TOOL, tasks=_TASKS),
    marks=("base_model",),
    model="base_model",
    length=(("sequence_len",), 2048),
    task=_task,
    refuse=_refuse,
    divide=_divide,
    read=_read,
    written=_written,
    targets="lora_target_modules",
    pattern=_pattern,
    trains=_trains,
    fields=_fields,
    stretches=True,
    keeps=_keeps,
    notes=_notes,
    rounds=_rounds,
    defaults=_DEFAULTS,
    meaning=_meaning,
)
