"""Files of LLaMA-Factory."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, shown
from autofit.core.task import Task
from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.tasks.reward import REWARD
from autofit.export.importers.accelerate import divided_by_trainer, with_devices
from autofit.export.importers.division import Division
from autofit.export.importers.frozen import Trained, Weights
from autofit.export.importers.fsdp import DEFAULTS, by_trainer
from autofit.export.importers.importer import Importer, Keys, refused_key, task_of_keys
from autofit.export.tools.llamafactory import TOOL
from autofit.models.heads import VALUES

_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "lora_rank": 8,
    "finetuning_type": "lora",
    "optim": "adamw_torch_fused",
    "flash_attn": "sdpa",
    "quantization_type": "nf4",
    "quantization_method": "bnb",
    "double_quantization": True,
    "infer_dtype": "auto",
    "lora_target": "all",
}
_REFUSED = {
    "use_galore": "this optimizer is not known",
    "use_badam": "this optimizer is not known",
    "use_apollo": "this optimizer is not known",
    "use_adam_mini": "this optimizer is not known",
    "use_muon": "this optimizer is not known",
    "mixture_of_depths": "models whose depth is mixed are not known",
    "fp8": "its own way to fp8 is not known",
    "use_megatron": "Megatron is not tuned",
    "tensor_model_parallel_size": "Megatron is not tuned",
    "pipeline_model_parallel_size": "Megatron is not tuned",
    "expert_model_parallel_size": "Megatron is not tuned",
    "tp_size": "layers that are split over devices are not tuned",
}
_OF_IMAGES = (
    "image_max_pixels",
    "image_min_pixels",
    "video_max_pixels",
    "video_min_pixels",
)
# Of models that take images, too, only what reads texts is trained, unless a file says otherwise.
_FROZEN = {
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
    "freeze_language_model": False,
}
# What holds the images of a kind of model, what brings them to the texts, and what reads these;
# first of most kinds. LLaMA-Factory looks for these in the names of weights.
_PARTS = (("vision_tower",), ("multi_modal_projector",), ("language_model", "lm_head"))
_QWEN = (
    ("visual.pos_embed", "visual.patch_embed", "visual.blocks", "visual.deepstack_merger_list"),
    ("visual.merger",),
    ("language_model", "lm_head"),
)
_PARTS_OF = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _QWEN),
    **dict.fromkeys(("llama4", "mllama"), (("vision_model",), *_PARTS[1:])),
    **dict.fromkeys(("gemma3", "llava", "llava_next", "internvl", "mistral3", "paligemma"), _PARTS),
}
_KINDS = ("lora", "full", "freeze", None)
_REWARDS = "rm"  # its stage: pairs of answers, scored by a value head
_STAGES = (None, "sft", "pt")  # of language models

# What is learnt of images, and of answers about them.
_WITH_IMAGES = [IMAGE_TEXT_TO_TEXT.name, REWARD.name]
_WITH_IMAGES += [
    task.name for task in TASKS.values() if task.medium == "preferences" and TOOL.name in task.tools
]

# Its files are read of images and rewards, too; how they are written anew is not known, and rewards
# that autofit measures are of another head.
_TASKS = (*TOOL.tasks, IMAGE_TEXT_TO_TEXT.name, REWARD.name)


def _has_images(keys: Keys) -> bool:
    """Whether a file says how large images are."""
    return any(keys.get(name) for name in _OF_IMAGES)


def _task(keys: Keys) -> str:
    """By its stage and, of preferences, by the loss; of images where a file says their size."""
    stage = keys.get("stage")
    if stage == _REWARDS:
        return REWARD.name
    if stage in _STAGES:
        if _has_images(keys):
            return IMAGE_TEXT_TO_TEXT.name
        return CAUSAL_LM.name

    wanted = {"stage": stage}
    if "pref_loss" in keys:
        wanted["pref_loss"] = keys["pref_loss"]
    return task_of_keys(TOOL.name, wanted)


def _refuse(keys: Keys) -> str | None:
    """Why a file cannot be tuned, as a sentence; or None."""
    if keys.get("do_train") is False or keys.get("do_predict"):
        return "it does not train."
    if reason := refused_key(keys, _REFUSED):
        return reason

    kind = keys.get("finetuning_type")
    if kind not in ("full", "freeze"):
        for name, usual in _FROZEN.items():
            if keys.get(name, usual) != usual:
                return f"{name}: adapters beside other parts than what reads texts are not known."

    stage = keys.get("stage")
    task = _task(keys)
    if _has_images(keys) and task not in _WITH_IMAGES:
        return f"stage: {stage} is not tuned with images."
    if kind not in _KINDS:
        return f"finetuning_type: {kind} is not known."
    if stage not in _STAGES and task == CAUSAL_LM.name:
        return f"stage: {stage} is not tuned."

    return None


def _fields(keys: Keys, task: Task, config: Keys) -> dict[str, Any]:
    """How the model differs.

    Rewards are read of TRL's value head, beside which the language model's own gives its logits.
    Layers of which nothing is trained are not checkpointed.
    """
    fields: dict[str, Any] = {}
    if keys.get("stage") == _REWARDS:
        fields["head"] = VALUES
    if keys.get("finetuning_type") == "freeze" or keys.get("freeze_language_model"):
        fields["spares_frozen"] = True

    blocks = config.get("num_hidden_layers")
    if _is_expanded(keys) and is_whole(blocks, 1):
        more = _number_of_trained(keys)
        fields["options"] = {"num_hidden_layers": blocks + more}

    return fields


def _is_expanded(keys: Keys) -> bool:
    """Whether a model that is not there has more layers than the one that it is named after: those
    that LLaMA-Pro adds before the training."""
    name = str(keys.get("model_name_or_path"))
    is_named_so = name.rstrip("/").lower().endswith("-pro")
    if not keys.get("use_llama_pro") or not is_named_so:
        return False

    return not Path(name).expanduser().is_dir()


def _notes(keys: Keys) -> tuple[str, ...]:
    """On what is predicted otherwise than the file says."""
    if not _is_expanded(keys):
        return ()
    number = _number_of_trained(keys)
    return (f"LLaMA-Pro is taken to have added the {number} layers that are trained.",)


def _divide(keys: Keys, folder: Path) -> Division:
    """As Trainer does; Ray's workers are processes with a device each."""
    division = divided_by_trainer(keys, folder)
    workers = keys.get("ray_num_workers")
    if not workers:
        return division
    note = "the workers of Ray are taken to be on one machine."

    return with_devices(division, workers).noted(note)


def _trains(keys: Keys, weights: Weights) -> Trained | None:
    """All weights but those of images, or some blocks alone."""
    names = set(weights.sizes)
    if keys.get("finetuning_type") == "freeze":
        names = _of_some_blocks(keys, weights)

    parts = _PARTS_OF.get(weights.kind, ())
    for part, (key, usual) in zip(parts, _FROZEN.items(), strict=False):
        if keys.get(key, usual):
            names = {name for name in names if not _has_word(name, part)}

    return Trained(names)


def _has_word(name: str, words: Sequence[str]) -> bool:
    """Whether the name of a weight has one of these in it."""
    return any(word in name for word in words)


def _of_some_blocks(keys: Keys, weights: Weights) -> set[str]:
    """The weights of some blocks, or of some modules of these, and of modules outside of blocks."""
    modules = _listed(keys.get("freeze_trainable_modules", "all"))
    wanted = _listed(keys.get("freeze_extra_modules"))
    for block in _trained_blocks(keys, weights.blocks):
        for module in modules:
            part = f".{block}."
            if module != "all":
                part += module
            wanted.append(part)

    found = {name for name in weights.sizes if _has_word(name, wanted)}
    if not found:
        message = f"freeze_trainable_modules: no weight is in {', '.join(modules)}."
        raise InputError(message, "Correct it.")

    return found


def _trained_blocks(keys: Keys, blocks: int) -> range:
    """The numbers of the blocks that are trained.

    The last ones, the first ones where the key is negative, or those of LLaMA-Pro: the last of each
    of as many groups.
    """
    number = _number_of_trained(keys)
    if not blocks:
        raise InputError("the model does not say how many layers it has.", "Give another --model.")

    if keys.get("use_llama_pro"):
        if blocks % number:
            message = f"the {blocks} layers are no {shown(number)} groups of as many each."
            raise InputError(message, "Correct freeze_trainable_layers, or give another --model.")

        size = blocks // number
        return range(size - 1, blocks, size)

    if number < 0:
        return range(min(-number, blocks))
    return range(max(0, blocks - number), blocks)


def _number_of_trained(keys: Keys) -> int:
    """How many blocks are trained; negative: the first ones, which LLaMA-Pro has none of."""
    number = keys.get("freeze_trainable_layers", 2)
    is_known = is_whole(number) and number != 0
    if keys.get("use_llama_pro"):
        is_known = is_whole(number, 1)
    if not is_known:
        message = f"freeze_trainable_layers must be a positive whole number, not {shown(number)}."
        raise InputError(message, "Correct it.")

    return int(number)


def _listed(value: Any) -> list[str]:
    """Words that a file separates by commas."""
    words = [word.strip() for word in str(value or "").split(",")]
    return list(filter(None, words))


def _meaning(key: str, value: Any) -> Any:
    """What a value is called by the exporter."""
    if key == "flash_attn" and value in ("auto", None):
        return "sdpa"
    if key == "use_reentrant_gc":
        return False
    return value


def _read(keys: Keys, _: Division) -> Keys:
    """The keys without what says nothing.

    The dtype of inference is that of weights only where no key of training names one; where some
    blocks alone are trained, they are without adapters.
    """
    read = dict(keys)
    if any(keys.get(name) for name in ("bf16", "fp16", "pure_bf16")):
        read["infer_dtype"] = "auto"
    if keys.get("finetuning_type") == "freeze":
        read["finetuning_type"] = "full"

    return read


IMPORTER = Importer(
    tool=replace(TOOL, tasks=_TASKS, knobs={**TOOL.knobs, **by_trainer()}),
    marks=("finetuning_type", "cutoff_len", "template"),
    model="model_name_or_path",
    length=(("cutoff_len",), 2048),
    task=_task,
    refuse=_refuse,
    divide=_divide,
    read=_read,
    targets="lora_target",
    freezes_vision=True,
    trains=_trains,
    sees=_has_images,
    fields=_fields,
    notes=_notes,
    keeps=lambda keys: ("flash_attn",) if keys.get("neat_packing") else (),
    single=("stage", "pref_loss"),
    defaults=_DEFAULTS,
    meaning=_meaning,
)
