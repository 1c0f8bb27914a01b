"""Files and commands of ms-swift: `swift sft`, `swift pt` and `swift rlhf`."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, shown
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.core.task import Task
from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.dpo import DPO
from autofit.core.tasks.embed import EMBED
from autofit.core.tasks.generative_rerank import GENERATIVE_RERANK
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.tasks.rerank import RERANK
from autofit.export.importers.accelerate import (
    LAUNCHED_BY,
    divided_by_trainer,
    launched,
    read_launcher,
)
from autofit.export.importers.command_line import COMMAND, ENVIRONMENT
from autofit.export.importers.division import Division
from autofit.export.importers.frozen import (
    BY_CHECKPOINTING,
    Trained,
    Weights,
    beginning_with,
    first_weights,
    list_of_words,
    pattern_of,
)
from autofit.export.importers.importer import Importer, Keys, refused_key, task_of_keys
from autofit.export.tools.msswift import TOOL
from autofit.models.heads import PASSING

_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "tuner_type": "lora",
    "lora_rank": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "torch_dtype": "bfloat16",
    "gradient_checkpointing": True,
    "optim": "adamw_torch_fused",
    "attn_impl": "sdpa",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "use_liger_kernel": False,
    "torch_compile": False,
}
_SAMPLES = 16  # of a step on all devices, where a file gives no accumulation
_HALF = {"bfloat16": "bf16", "float16": "fp16"}
_REFUSED = {
    "use_vllm": "it generates with vLLM, which is not tuned",
    "teacher_model": "a teacher is not read from files yet",
    "use_galore": "this optimizer is not known",
    "optimizer": "this optimizer is not known",
    "lisa_activated_layers": "training some layers at a time is not known",
    "use_ray": "several machines of Ray are not tuned yet",
}
# What its name fsdp2 stands for.
_FSDP2: dict[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config.fsdp_version": 2,
    "fsdp_config.reshard_after_forward": True,
}
_OF_IMAGES = ("ENV.MAX_PIXELS", "ENV.VIDEO_MAX_PIXELS", "max_pixels")
# Of models that take images, too, only what reads texts is trained, unless a command says so.
_FROZEN = {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": False}
# Where the names of weights begin that hold images or sounds, and that bring them to the texts.
_TOWERS = ("model.visual", "model.vision_tower", "model.vision_model", "model.audio_tower")
_ALIGNERS = (
    *("model.visual.merger", "model.visual.deepstack_merger_list", "model.audio_tower.proj"),
    *("model.multi_modal_projector", "model.connector"),
)
_READERS = ("model.language_model", "lm_head")
_PARTS = {"freeze_llm": _READERS, "freeze_vit": _TOWERS, "freeze_aligner": _ALIGNERS}
_OF_TASKS = ("rlhf_type", "task_type")
_NO_TASK = (None, "causal_lm")  # of which these say nothing
_NEW_BLOCKS = "llamapro_num_new_blocks"
_ADDS_BLOCKS = "llamapro"  # and trains these alone, without adapters
_TUNERS = ("lora", "full", _ADDS_BLOCKS, None)

# What is learnt of texts with images, too.
_ABOUT_IMAGES = (*(task.name for task in TASKS.values() if TOOL.name in task.tools), EMBED.name)

# What puts passages in order, a sample of which are several, and by which losses.
_RANKERS = (RERANK.name, GENERATIVE_RERANK.name)
_RANKED_BY = (None, "pointwise_reranker", "listwise_reranker")
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

# Its files are read of images and embeddings, too; how they are written anew is not known.
_TASKS = (*TOOL.tasks, IMAGE_TEXT_TO_TEXT.name, EMBED.name)
_EMBEDDING = "embedding"  # its task_type, by one of these losses
_EMBEDDED_BY = (None, "infonce", "cosine_similarity", "contrastive")
_NEGATIVES = "ENV.INFONCE_HARD_NEGATIVES"


def _command(keys: Keys) -> str:
    """What a command runs; empty of a file."""
    return str(keys.get(COMMAND) or "")


def _has_images(keys: Keys) -> bool:
    """Whether a file says how large images are."""
    return any(keys.get(name) for name in _OF_IMAGES)


def _task(keys: Keys) -> str:
    """By the keys of tasks, by the command, or by keys of images."""
    wanted = {}
    for name in _OF_TASKS:
        if keys.get(name) not in _NO_TASK:
            wanted[name] = keys[name]

    if _command(keys).endswith("rlhf"):
        wanted.setdefault("rlhf_type", DPO.name)
    if wanted.get("task_type") == _EMBEDDING:
        return EMBED.name
    if wanted:
        return task_of_keys(TOOL.name, wanted)
    if _has_images(keys):
        return IMAGE_TEXT_TO_TEXT.name
    return CAUSAL_LM.name


def _refuse(keys: Keys) -> str | None:
    """Why a file cannot be tuned, as a sentence; or None."""
    if _command(keys).startswith("megatron"):
        return "it trains with Megatron, which is not tuned."
    if reason := refused_key(keys, _REFUSED):
        return reason

    tuner = _tuner(keys)
    if tuner not in _TUNERS:
        return f"tuner_type: {tuner} is not known."
    if keys.get("tuner_backend", "peft") != "peft":
        return f"tuner_backend: {keys['tuner_backend']} is not known."

    if tuner != "full":
        for name, usual in _FROZEN.items():
            if keys.get(name, usual) != usual:
                return f"{name}: adapters beside other parts than what reads texts are not known."

    task = _task(keys)
    if _has_images(keys) and task not in (IMAGE_TEXT_TO_TEXT.name, *_ABOUT_IMAGES):
        return f"MAX_PIXELS: {keys.get('task_type')} is not tuned with images."

    if task == CAUSAL_LM.name:
        for name in _OF_TASKS:
            if keys.get(name) not in _NO_TASK:
                return f"{name}: {keys[name]} is not tuned."

    loss = keys.get("loss_type")
    is_embedded = task != EMBED.name or loss in _EMBEDDED_BY
    is_ranked = task not in _RANKERS or loss in _RANKED_BY
    if not is_embedded or not is_ranked:
        return f"loss_type: {loss} is not known."

    return None


def _fields(keys: Keys, task: Task, config: Keys) -> dict[str, Any]:
    """How many passages there are for a query, how many classes, and the blocks with those that are
    added."""
    fields: dict[str, Any] = {}
    if task.name in _RANKERS:
        fields["texts"] = _passages(keys)

    if task.name == EMBED.name:
        texts = 2  # that belong together
        negatives = keys.get(_NEGATIVES)
        if is_whole(negatives, 1):
            texts += negatives
        fields["texts"] = texts
        fields["head"] = PASSING

    options: dict[str, Any] = {}
    if _tuner(keys) == _ADDS_BLOCKS:
        options = _with_more_blocks(keys, config)

    if task.classifies:
        if is_whole(keys.get("num_labels"), 1):
            options["num_labels"] = keys["num_labels"]
        if keys.get("problem_type") in _PROBLEMS:
            options["problem_type"] = keys["problem_type"]

    if options:
        fields["options"] = options
    return fields


def _with_more_blocks(keys: Keys, config: Keys) -> dict[str, Any]:
    """The keys of a model's config after a copy of a block is put behind each group of blocks."""
    blocks = config.get("num_hidden_layers")
    if not is_whole(blocks, 1):
        message = "the model does not say how many layers it has, or reads more than texts."
        raise InputError(message, "Give another --model.")

    groups = _groups(keys)
    if blocks % groups:
        message = f"{_NEW_BLOCKS}: {blocks} layers are no {groups} groups of as many each."
        raise InputError(message, "Correct it.")

    options: dict[str, Any] = {"num_hidden_layers": blocks + groups}
    kinds = config.get("layer_types")
    if kinds:
        size = blocks // groups
        with_copies = []
        for start in range(0, blocks, size):
            group = kinds[start : start + size]
            with_copies += [*group, group[-1]]
        options["layer_types"] = with_copies

    return options


def _groups(keys: Keys) -> int:
    """How many groups of blocks there are, behind each of which stands a new one."""
    added = keys.get(_NEW_BLOCKS, 4)
    groups = keys.get("llamapro_num_groups") or added
    if not is_whole(added, 1) or groups != added:
        rule = "must be a whole number and that of the groups"
        raise InputError(f"{_NEW_BLOCKS} {rule}, not {shown(added)}.", "Correct it.")

    return int(added)


def _tuner(keys: Keys) -> Any:
    """How it trains, by the newer name of the key or the older one."""
    return keys.get("tuner_type", keys.get("train_type"))


def _passages(keys: Keys) -> int:
    """The passages of a query, by variables of the shell.

    Each positive one is read beside as many negative ones.
    """
    positive = _count_of("MAX_POSITIVE_SAMPLES", keys, usual=1, least=1)
    negative = _count_of("MAX_NEGATIVE_SAMPLES", keys, usual=7, least=0)
    return positive * (1 + negative)


def _count_of(name: str, keys: Keys, *, usual: int, least: int) -> int:
    """The whole number that a variable of the shell holds."""
    number = keys.get(f"{ENVIRONMENT}{name}", usual)
    if not is_whole(number, least):
        message = f"{name} must be a whole number, not {shown(number)}."
        raise InputError(message, "Correct it.")

    return number


def _notes(keys: Keys) -> tuple[str, ...]:
    """On what is predicted otherwise than the file says."""
    notes = []
    if _task(keys) in _RANKERS:
        passages = _passages(keys)
        notes.append(f"each sample is taken to be a query with {passages} passages, a text each.")

    classes = keys.get("num_labels")
    if classes is not None and not is_whole(classes, 1):
        notes.append(f"num_labels says no number: two classes stand for {shown(classes)}.")

    if "emu3" in str(keys.get("model")).lower():
        notes.append(
            "the model that makes tokens of images is on the device, too, with 1.1 GB on top of "
            "what is predicted."
        )

    if keys.get("init_weights") == "lora-ga":
        notes.append(
            "adapters that begin with gradients are trained as others are: what finding these "
            "takes before training is not predicted."
        )

    return tuple(notes)


def _trains(keys: Keys, weights: Weights) -> Trained | None:
    """All weights but those of images and those that keys freeze, and then what others free
    again."""
    if _tuner(keys) == _ADDS_BLOCKS:
        trained = _of_new_blocks(keys, weights)
    else:
        trained = _not_frozen(keys, weights)
        if not trained:
            raise InputError("freeze_parameters: nothing is left to train.", "Correct it.")

    checkpoints = keys.get("gradient_checkpointing", True) is not False
    return Trained(trained, checkpoints, BY_CHECKPOINTING)


def _of_new_blocks(keys: Keys, weights: Weights) -> set[str]:
    """The weights of the last block of each group."""
    size = weights.blocks // _groups(keys)
    added = [f".{block}." for block in range(size - 1, weights.blocks, size)]
    return {name for name in weights.sizes if any(block in name for block in added)}


def _not_frozen(keys: Keys, weights: Weights) -> set[str]:
    """The weights that no key freezes, and those that a key frees again."""
    names = set(weights.sizes)
    frozen_prefixes = list_of_words("freeze_parameters", keys.get("freeze_parameters"))
    freed_prefixes = list_of_words("trainable_parameters", keys.get("trainable_parameters"))
    if any(name.startswith((*_TOWERS, *_ALIGNERS)) for name in names):
        for key, prefixes in _PARTS.items():
            if keys.get(key, _FROZEN[key]):
                frozen_prefixes += prefixes

        if not keys.get("freeze_aligner", True):
            freed_prefixes += _ALIGNERS

    frozen = beginning_with(weights, frozen_prefixes)
    frozen |= _share_frozen(keys, weights)
    frozen |= _matching("freeze_parameters_regex", keys, weights)
    freed = beginning_with(weights, freed_prefixes)
    freed |= _matching("trainable_parameters_regex", keys, weights)
    return (names - frozen) | freed


def _matching(key: str, keys: Keys, weights: Weights) -> set[str]:
    """The weights in whose names the pattern of a key is found; none without one."""
    text = keys.get(key)
    if not text:
        return set()

    pattern = pattern_of(key, str(text))
    return set(filter(pattern.search, weights.sizes))


def _share_frozen(keys: Keys, weights: Weights) -> set[str]:
    """The first weights, by `freeze_parameters_ratio`."""
    share = keys.get("freeze_parameters_ratio") or 0
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= 1:
        message = f"freeze_parameters_ratio must be from 0 to 1, not {shown(share)}."
        raise InputError(message, "Correct it.")

    return first_weights(weights, share)


def _divide(keys: Keys, folder: Path) -> Division:
    """By FSDP or DeepSpeed, which may have names of its own, or by a file for accelerate."""
    launcher = keys.get(LAUNCHED_BY)
    if launcher:
        return launched(read_launcher(str(launcher), folder), keys)

    said = dict(keys)
    for key, value in keys.items():
        if key.startswith("fsdp."):
            said[key.removeprefix("fsdp.")] = value

    is_fsdp2 = keys.get("fsdp") == "fsdp2"
    if is_fsdp2:
        said |= _FSDP2
    sizes = {"sequence_parallel_size": "context_parallel"}  # by an exchange of heads
    division = divided_by_trainer(said, folder, sizes=sizes).closed()
    if is_fsdp2:  # which checkpoints blocks itself
        division = replace(
            division,
            knobs={**division.knobs, CHECKPOINTING.name: "full"},
            holds=(*division.holds, CHECKPOINTING.name),
        )

    return launched(division, keys)


def _read(keys: Keys, division: Division) -> Keys:
    """The keys with what it works out itself: the accumulation, and how weights, adapters and
    products are held.

    Weights in 16 bits stay so under autocast; adapters beside them are in float32.
    """
    read = dict(keys)
    if _tuner(keys) == _ADDS_BLOCKS:
        for name in ("tuner_type", "train_type"):
            if name in read:
                read[name] = "full"

    micro = read.get("per_device_train_batch_size") or 1
    if read.get("gradient_accumulation_steps") is None and is_whole(micro, 1):
        world = (division.devices or 1) * (division.nodes or 1)
        steps = math.ceil(_SAMPLES / micro / world)
        read["gradient_accumulation_steps"] = max(1, steps)

    dtype = read.get("torch_dtype") or _DEFAULTS["torch_dtype"]
    has_adapters = _tuner(read) != "full"
    are_adapters_narrow = dtype in _HALF and read.get("lora_dtype") == dtype
    if has_adapters and not are_adapters_narrow:
        read["lora_dtype"] = "float32"

    autocast = _HALF.get(dtype, "fp16")
    for name in ("bf16", "fp16"):
        read.setdefault(name, name == autocast)

    if dtype not in _HALF:
        return read
    if division.widens and not has_adapters:
        read["torch_dtype"] = "float32"  # of what is trained; the rest is under autocast
    elif are_adapters_narrow or not has_adapters:
        read |= {"bf16": False, "fp16": False}

    return read


def _meaning(key: str, value: Any) -> Any:
    """What a value is called by the exporter."""
    if key == "attn_impl" and str(value).startswith("flash"):
        return "flash_attn"
    if key == "gradient_checkpointing_kwargs.use_reentrant":
        return False
    return value


def _keeps(keys: Keys) -> tuple[str, ...]:
    """Packed samples see one another but with flash attention, and without padding as well."""
    return ("attn_impl",) if keys.get("packing") or keys.get("padding_free") else ()


IMPORTER = Importer(
    tool=replace(TOOL, tasks=_TASKS, has_own_loss=lambda device, task: task == EMBED.name),
    programs=tuple(itertools.product(("swift", "megatron"), ("sft", "pt", "rlhf"))),
    marks=("tuner_type", "train_type", "rlhf_type"),
    model="model",
    length=(("max_length",), 2048),
    task=_task,
    refuse=_refuse,
    divide=_divide,
    read=_read,
    targets="target_modules",
    pattern=lambda keys: keys.get("target_regex"),
    freezes_vision=True,
    trains=_trains,
    sees=_has_images,
    fields=_fields,
    notes=_notes,
    keeps=_keeps,
    older={"tuner_type": "train_type"},
    defaults=_DEFAULTS,
    meaning=_meaning,
)
