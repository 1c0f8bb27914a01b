"""Files of LLaMA-Factory."""

from dataclasses import replace
from typing import Any

from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.export.importers.accelerate import divided_by_trainer
from autofit.export.importers.division import Division
from autofit.export.importers.fsdp import BY_TRAINER, DEFAULTS
from autofit.export.importers.importer import Importer, Keys
from autofit.export.tools.llamafactory import TOOL

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
    "use_llama_pro": "training some layers alone is not known",
    "use_megatron": "Megatron is not tuned",
    "tp_size": "layers that are split over devices are not tuned",
    "ray_num_workers": "several machines of Ray are not tuned yet",
}
_OF_IMAGES = ("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels")
# Of models that take images, too, only what reads texts is trained, unless a file says otherwise.
_FROZEN = {
    "freeze_vision_tower": True,
    "freeze_multi_modal_projector": True,
    "freeze_language_model": False,
}
_KINDS = ("lora", "full", None)
_STAGES = {None: CAUSAL_LM.name, "sft": CAUSAL_LM.name, "pt": CAUSAL_LM.name}

# Its files are read of images, too; how they are written anew is not known.
_TASKS = (*TOOL.tasks, IMAGE_TEXT_TO_TEXT.name)


def _has_images(keys: Keys) -> bool:
    return any(keys.get(name) for name in _OF_IMAGES)


def _task(keys: Keys) -> str:
    stage = keys.get("stage")
    if stage in _STAGES:
        return IMAGE_TEXT_TO_TEXT.name if _has_images(keys) else _STAGES[stage]
    wanted = {name: keys[name] for name in ("stage", "pref_loss") if name in keys}
    for task in TASKS.values():
        if task.tools.get(TOOL.name, {}).items() >= wanted.items():
            return task.name
    return CAUSAL_LM.name


def _refuse(keys: Keys) -> str | None:
    if keys.get("do_train") is False or keys.get("do_predict"):
        return "it does not train."
    for name, why in _REFUSED.items():
        if keys.get(name):
            return f"{name}: {why}."
    for name, usual in _FROZEN.items():
        if keys.get(name, usual) != usual:
            return f"{name}: training other parts of a model than what reads texts is not known."
    if _has_images(keys) and keys.get("finetuning_type") == "full":
        return (
            "freeze_vision_tower: a part that stays as it is beside all other weights is not known."
        )
    if _has_images(keys) and _task(keys) != IMAGE_TEXT_TO_TEXT.name:
        return f"stage: {keys['stage']} is not tuned with images."
    if keys.get("finetuning_type") not in _KINDS:
        return f"finetuning_type: {keys['finetuning_type']} is not known."
    if keys.get("stage") not in _STAGES and _task(keys) == CAUSAL_LM.name:
        return f"stage: {keys['stage']} is not tuned."
    return None


def _meaning(key: str, value: Any) -> Any:
    if key == "flash_attn" and value in ("auto", None):
        return "sdpa"
    if key == "use_reentrant_gc":
        return False
    return value


def _read(keys: Keys, _: Division) -> Keys:
    """The dtype of inference is that of weights only where no key of training names one."""
    names_one = any(keys.get(name) for name in ("bf16", "fp16", "pure_bf16"))
    return {**keys, "infer_dtype": "auto"} if names_one else keys


IMPORTER = Importer(
    tool=replace(TOOL, tasks=_TASKS, knobs={**TOOL.knobs, **BY_TRAINER}),
    marks=("finetuning_type", "cutoff_len", "template"),
    model="model_name_or_path",
    length=("cutoff_len", 2048),
    task=_task,
    refuse=_refuse,
    divide=divided_by_trainer,
    read=_read,
    targets="lora_target",
    freezes_vision=True,
    keeps=lambda keys: ("flash_attn",) if keys.get("neat_packing") else (),
    single=("stage", "pref_loss"),
    defaults=_DEFAULTS,
    meaning=_meaning,
)
