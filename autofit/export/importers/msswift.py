"""Files and commands of ms-swift: `swift sft`, `swift pt` and `swift rlhf`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, shown
from autofit.core.task import Task
from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.dpo import DPO
from autofit.core.tasks.embed import EMBED
from autofit.core.tasks.generative_rerank import GENERATIVE_RERANK
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.tasks.rerank import RERANK
from autofit.export.importers.accelerate import (
    divided_by_trainer,
    read_launcher,
    with_devices,
)
from autofit.export.importers.command_line import COMMAND
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
from autofit.export.importers.importer import Importer, Keys
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
# Of models that take images, too, only what reads texts is trained, unless a command says otherwise.
_FROZEN = {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": False}
# Where the names of weights begin that hold images or sounds, and that bring them to the texts.
_TOWERS = ("model.visual", "model.vision_tower", "model.vision_model", "model.audio_tower")
_ALIGNERS = (
    *("model.visual.merger", "model.visual.deepstack_merger_list", "model.audio_tower.proj"),
    *("model.multi_modal_projector", "model.connector"),
)
_READERS = ("model.language_model", "lm_head")
_PROCESSES = ("ENV.NPROC_PER_NODE", "launcher.nproc_per_node")  # of each machine
_OF_ALL = "launcher.num_processes"  # of all machines, as accelerate counts
_MACHINES = ("ENV.NNODES", "launcher.nnodes", "launcher.num_machines")
_OF_TASKS = ("rlhf_type", "task_type")
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
    return str(keys.get(COMMAND) or "")


def _has_images(keys: Keys) -> bool:
    return any(keys.get(name) for name in _OF_IMAGES)


def _task(keys: Keys) -> str:
    wanted = {name: keys[name] for name in _OF_TASKS if keys.get(name) not in (None, "causal_lm")}
    if _command(keys).endswith("rlhf"):
        wanted.setdefault("rlhf_type", DPO.name)
    if wanted.get("task_type") == _EMBEDDING:
        return EMBED.name
    if not wanted and _has_images(keys):
        return IMAGE_TEXT_TO_TEXT.name
    for task in TASKS.values():
        if wanted and task.tools.get(TOOL.name, {}).items() >= wanted.items():
            return task.name

    return CAUSAL_LM.name


def _refuse(keys: Keys) -> str | None:
    if _command(keys).startswith("megatron"):
        return "it trains with Megatron, which is not tuned."
    for name, why in _REFUSED.items():
        if keys.get(name) or any(key.startswith(f"{name}.") for key in keys):
            return f"{name}: {why}."

    tuner = _tuner(keys)
    if tuner not in _TUNERS:
        return f"tuner_type: {tuner} is not known."
    for name, usual in _FROZEN.items():
        if tuner != "full" and keys.get(name, usual) != usual:
            return f"{name}: adapters beside other parts than what reads texts are not known."

    if _has_images(keys) and _task(keys) not in (IMAGE_TEXT_TO_TEXT.name, *_ABOUT_IMAGES):
        return f"MAX_PIXELS: {keys.get('task_type')} is not tuned with images."
    if keys.get("tuner_backend", "peft") != "peft":
        return f"tuner_backend: {keys['tuner_backend']} is not known."

    for name in _OF_TASKS:
        if keys.get(name) not in (None, "causal_lm") and _task(keys) == CAUSAL_LM.name:
            return f"{name}: {keys[name]} is not tuned."

    if _task(keys) == EMBED.name and keys.get("loss_type") not in _EMBEDDED_BY:
        return f"loss_type: {keys['loss_type']} is not known."
    if _task(keys) in _RANKERS and keys.get("loss_type") not in _RANKED_BY:
        return f"loss_type: {keys['loss_type']} is not known."

    return None


def _fields(keys: Keys, task: Task, config: Keys) -> dict[str, Any]:
    """How many passages there are for a query, how many classes, and the blocks with those that are added."""
    fields: dict[str, Any] = {}
    if task.name in _RANKERS:
        fields["texts"] = _passages(keys)
    if task.name == EMBED.name:
        negatives = keys.get(_NEGATIVES)
        more = negatives if is_whole(negatives, 1) else 0
        fields |= {"texts": 2 + more, "head": PASSING}

    options: dict[str, Any] = {}
    if _tuner(keys) == _ADDS_BLOCKS:
        options |= _with_more_blocks(keys, config)
    if task.classifies and is_whole(keys.get("num_labels"), 1):
        options["num_labels"] = keys["num_labels"]
    kind = keys.get("problem_type")
    if task.classifies and kind in _PROBLEMS:
        options["problem_type"] = kind

    return {**fields, "options": options} if options else fields


def _with_more_blocks(keys: Keys, config: Keys) -> dict[str, Any]:
    """The keys of a model's config after a copy of a block is put behind each group of blocks."""
    blocks = config.get("num_hidden_layers")
    if not is_whole(blocks, 1):
        message = "the model does not say how many layers it has, or reads more than texts."
        raise InputError(message, "Give another --model.")

    groups = _groups(keys)
    if blocks % groups:
        message = (
            f"llamapro_num_new_blocks: {blocks} layers are no {groups} groups of as many each."
        )
        raise InputError(message, "Correct it.")

    options: dict[str, Any] = {"num_hidden_layers": blocks + groups}
    kinds = config.get("layer_types")
    if kinds:
        each = blocks // groups
        options["layer_types"] = []
        for start in range(0, blocks, each):
            group = kinds[start : start + each]
            options["layer_types"] += [*group, group[-1]]

    return options


def _groups(keys: Keys) -> int:
    """How many groups of blocks there are, behind each of which stands a new one."""
    key = "llamapro_num_new_blocks"
    added = keys.get(key, 4)
    groups = keys.get("llamapro_num_groups") or added
    if not is_whole(added, 1) or groups != added:
        message = f"{key} must be a whole number and that of the groups, not {shown(added)}."
        raise InputError(message, "Correct it.")

    return int(added)


def _tuner(keys: Keys) -> Any:
    return keys.get("tuner_type", keys.get("train_type"))


def _passages(keys: Keys) -> int:
    """Each positive passage of a query is read beside as many negative ones; variables of the shell say how
    many."""
    numbers = []
    for name, usual in {"MAX_POSITIVE_SAMPLES": 1, "MAX_NEGATIVE_SAMPLES": 7}.items():
        number = keys.get(f"ENV.{name}", usual)
        if not is_whole(number, 0 if usual > 1 else 1):
            message = f"{name} must be a whole number, not {shown(number)}."
            raise InputError(message, "Correct it.")

        numbers.append(number)

    positive, negative = numbers

    return positive * (1 + negative)


def _notes(keys: Keys) -> tuple[str, ...]:
    notes = []
    if _task(keys) in _RANKERS:
        passages = _passages(keys)
        notes.append(f"each sample is taken to be a query with {passages} passages, a text each.")

    classes = keys.get("num_labels")
    if classes is not None and not is_whole(classes, 1):
        notes.append(f"num_labels says no number: two classes stand for {shown(classes)}.")
    if "emu3" in str(keys.get("model")).lower():
        notes.append(
            "the model that makes tokens of images is on the device, too, with 1.1 GB on top of what "
            "is predicted."
        )

    if keys.get("init_weights") == "lora-ga":
        notes.append(
            "adapters that begin with gradients are trained as others are: what finding these takes "
            "before training is not predicted."
        )

    return tuple(notes)


def _trains(keys: Keys, weights: Weights) -> Trained | None:
    """All weights but those of images and those that keys freeze, and then what others free again."""
    names = list(weights.sizes)
    if _tuner(keys) == _ADDS_BLOCKS:
        each = weights.blocks // _groups(keys)
        added = tuple(f".{block}." for block in range(each - 1, weights.blocks, each))
        found = {name for name in names if any(block in name for block in added)}

        return Trained(found, _checkpoints(keys), BY_CHECKPOINTING)

    is_seeing = any(name.startswith((*_TOWERS, *_ALIGNERS)) for name in names)
    frozen_prefixes = list_of_words("freeze_parameters", keys.get("freeze_parameters"))
    freed_prefixes = list_of_words("trainable_parameters", keys.get("trainable_parameters"))
    if is_seeing:
        parts = {"freeze_llm": _READERS, "freeze_vit": _TOWERS, "freeze_aligner": _ALIGNERS}
        for key, part in parts.items():
            if keys.get(key, _FROZEN[key]):
                frozen_prefixes += part

        if not keys.get("freeze_aligner", True):
            freed_prefixes += _ALIGNERS

    frozen = beginning_with(weights, frozen_prefixes) | _share_frozen(keys, weights)
    freed = beginning_with(weights, freed_prefixes)
    for key, into in {"freeze": frozen, "trainable": freed}.items():
        key = f"{key}_parameters_regex"
        if keys.get(key):
            into |= set(filter(pattern_of(key, str(keys[key])).search, names))

    trained = (set(names) - frozen) | freed
    if not trained:
        raise InputError("freeze_parameters: nothing is left to train.", "Correct it.")
    return Trained(trained, _checkpoints(keys), BY_CHECKPOINTING)


def _checkpoints(keys: Keys) -> bool:
    return keys.get("gradient_checkpointing", True) is not False


def _share_frozen(keys: Keys, weights: Weights) -> set[str]:
    """The first weights, by `freeze_parameters_ratio`."""
    share = keys.get("freeze_parameters_ratio") or 0
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        message = f"freeze_parameters_ratio must be from 0 to 1, not {shown(share)}."
        raise InputError(message, "Correct it.")

    return first_weights(weights, share)


def _divide(keys: Keys, folder: Path) -> Division:
    """By FSDP or DeepSpeed, which may have names of its own, or by a file for accelerate."""
    launcher = keys.get("launcher.config_file")
    if launcher:
        return read_launcher(str(launcher), folder)

    preset = _FSDP2 if keys.get("fsdp") == "fsdp2" else {}
    inside = {
        key.removeprefix("fsdp."): value for key, value in keys.items() if key.startswith("fsdp.")
    }
    sizes = {"sequence_parallel_size": "context_parallel"}  # by an exchange of heads
    division = divided_by_trainer(
        {**keys, **inside, **preset},
        folder,
        sizes=sizes,
    ).closed()
    if preset:  # which checkpoints blocks itself
        knobs = {**division.knobs, "activation_checkpointing": "full"}
        holds = (*division.holds, "activation_checkpointing")
        division = replace(division, knobs=knobs, holds=holds)

    machines = next((keys[name] for name in _MACHINES if keys.get(name)), 1)
    nodes = machines if is_whole(machines, 1) else None
    processes = next((keys[name] for name in _PROCESSES if keys.get(name)), None)
    of_all = keys.get(_OF_ALL)
    if nodes is not None and is_whole(of_all, nodes):
        processes = of_all // nodes

    return with_devices(replace(division, nodes=nodes), processes)


def _read(keys: Keys, division: Division) -> Keys:
    """With what it works out itself: the accumulation, and how weights, adapters and products are held.

    Weights in 16 bits stay so under autocast; adapters beside them are in float32.
    """
    read = dict(keys)
    if _tuner(keys) == _ADDS_BLOCKS:
        read |= dict.fromkeys({"tuner_type", "train_type"} & read.keys(), "full")
    micro = read.get("per_device_train_batch_size") or 1
    if read.get("gradient_accumulation_steps") is None and is_whole(micro, 1):
        world = (division.devices or 1) * (division.nodes or 1)
        read["gradient_accumulation_steps"] = max(1, math.ceil(_SAMPLES / micro / world))

    dtype = read.get("torch_dtype") or _DEFAULTS["torch_dtype"]
    autocast = _HALF.get(dtype, "fp16")
    has_adapters = _tuner(read) != "full"
    is_narrow = dtype in _HALF and read.get("lora_dtype") == dtype
    if has_adapters and not is_narrow:
        read["lora_dtype"] = "float32"
    for name in ("bf16", "fp16"):
        read.setdefault(name, name == autocast)
    if dtype in _HALF and not has_adapters and division.widens:
        read["torch_dtype"] = "float32"  # of what is trained; the rest is under autocast
    elif dtype in _HALF and (is_narrow or not has_adapters):
        read |= {"bf16": False, "fp16": False}

    return read


def _meaning(key: str, value: Any) -> Any:
    if key == "attn_impl" and str(value).startswith("flash"):
        return "flash_attn"
    if key == "gradient_checkpointing_kwargs.use_reentrant":
        return False
    return value


def _keeps(keys: Keys) -> tuple[str, ...]:
    """Packed samples see one another but with flash attention, and without padding as well. Embeddings are
    told from those of the same micro-batch."""
    kept: tuple[str, ...] = ()
    if keys.get("packing") or keys.get("padding_free"):
        kept = ("attn_impl",)
    if _task(keys) == EMBED.name:
        kept += ("per_device_train_batch_size",)

    return kept


IMPORTER = Importer(
    tool=replace(TOOL, tasks=_TASKS, has_own_loss=lambda device, task: task == EMBED.name),
    programs=tuple(
        (program, does) for program in ("swift", "megatron") for does in ("sft", "pt", "rlhf")
    ),
    marks=("tuner_type", "train_type", "rlhf_type"),
    model="model",
    length=("max_length", 2048),
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
