"""Keys that several tools share. Each function makes the share of one knob; tools that need other
names give them.

Many tools are built on transformers' Trainer, whose keys are taken from `trainer`. Off values are
written out, because the defaults of these tools differ: TRL and LLaMA-Factory checkpoint by
default, and TRL loads weights in float32.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from autofit.core.knobs.activation_checkpointing import checkpoints_blocks
from autofit.core.knobs.lora_alpha import USUAL_ALPHA
from autofit.core.knobs.reference import COPIED
from autofit.core.learning_rates import default_hyperparameters
from autofit.core.tasks import task_named
from autofit.export.source import LEARNT, ExportSource, batches_fit
from autofit.export.tool import LANGUAGE_MODELS, Request, Share, ToolKeys
from autofit.export.trainer import (
    OF_BF16,
    TRAINER_KNOBS,
    TrainerCase,
    TrainerKeywords,
)

RENAMED = "5.23.0"  # of transformers, where gradient_checkpointing became activation_checkpointing
OFFLOADS = "5.17.0"  # of transformers, where checkpointing got an option to offload
# The knobs that are set by TrainingArguments alone.
TRAINER_ALONE = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "optimizer",
    "optimizer_offload",
    "optimizer_in_backward",
    "parameter_offload",
)
# Sentences with the tool's title left open.
TF32 = "{} multiplies in float32 unless torch.set_float32_matmul_precision('high') is called"
_NEVER_ALL = "which never holds the logits of all tokens"
FP8 = "{} multiplies in bfloat16 here, which is slower than measured"
WHOLE_BLOCKS = "{} checkpoints every block whole, with less memory and more time than measured"
LIGHTNING_PRECISION = {
    **dict.fromkeys(("fp32", "tf32"), "32-true"),
    **dict.fromkeys(("bf16", "fp8"), "bf16-true"),
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
}
_LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
ADAFACTOR_EPS = [1.0e-15, 1.0]  # of torch's, with which lr means what it means to AdamW
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("torch.optim.AdamW", {"fused": True}),
    "adamw-foreach": ("torch.optim.AdamW", {"foreach": True}),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "adamw-4bit": ("torchao.optim.AdamW4bit", {}),
    "adamw-fp8": ("torchao.optim.AdamWFp8", {}),
    "adamw-8bit-sr": ("torchao.optim.AdamW8bit", {"bf16_stochastic_round": True}),
    "paged-adamw": ("bitsandbytes.optim.PagedAdamW", {}),
    "lion-8bit": ("bitsandbytes.optim.Lion8bit", {}),
    "adafactor": ("torch.optim.Adafactor", {"eps": ADAFACTOR_EPS}),
    "sgd": ("torch.optim.SGD", {}),
}
LORA_KINDS = ("attention", "all-linear", "all-linear+head")
_MISSING = {  # what many tools do without a knob; after the title
    "activation_offload": "keeps activations on the device",
    "optimizer_offload": "keeps the optimizer's state on the device",
    "optimizer_in_backward": "holds all gradients until the update",
    "parameter_offload": "keeps weights on the device",
    "attention": "calls PyTorch's fused attention, which chooses by itself",
    "kernels": "has none of Liger's, and keeps more for the backward",
}
_TRAINER_OFF: Mapping[str, Mapping[str, Any]] = {
    "precision": {"bf16": False, "fp16": False},
    "activation_checkpointing": {"activation_checkpointing": False},
    "compile": {"torch_compile": False},
    "kernels": {"use_liger_kernel": False},
}


def values(**paths: str) -> dict[str, Share]:
    """The rows of knobs whose values are taken as they are, with the path of each."""

    def share(request: Request, knob: str) -> ToolKeys:
        return ToolKeys({paths[knob]: request.config[knob]})

    return {knob: partial(share, knob=knob) for knob in paths}


def missing(
    title: str,
    *knobs: str,
    may_not_fit: bool = True,
    **instead: str,
) -> dict[str, Share]:
    """The rows of knobs that the tool has nothing for.

    Args:
        knobs: those without which it does what many tools do.
        instead: what it does without others, by knob.
    """

    def share(request: Request, knob: str, what: str) -> ToolKeys:
        if request.config[knob] in (None, request.source.off.get(knob)):
            return ToolKeys()
        return request.keys(knob, {}, what, may_not_fit=may_not_fit)

    whats = {knob: f"{title} {_MISSING[knob]}" for knob in knobs}
    whats |= instead
    return {knob: partial(share, knob=knob, what=what) for knob, what in whats.items()}


def refuse_unknown(source: ExportSource, known: Collection[str], what: str) -> str | None:
    """For `refuse` of a tool with models of its own: these weights are none of them, or the batch
    sizes are wrong."""
    if source.weights in known:
        return batches_fit(source)
    return f"no {what} is known here for {source.weights}."


def global_batch(request: Request, path: str) -> ToolKeys:
    """The effective batch, from which the tool works out its accumulation."""
    micro = int(request.config.micro_batch_size or 1)
    steps = int(request.config.gradient_accumulation_steps or 1)

    return ToolKeys({path: micro * steps * request.source.layout.dp_degree})


def convolutions(request: Request) -> str | None:
    """How a tool that leaves the rounding of fp32 to PyTorch deviates on models with
    convolutions."""
    on_a_card = request.source.device == "cuda" and request.config.precision == "fp32"
    if not on_a_card or task_named(request.source.task).medium not in ("images", "own"):
        return None
    switch = "torch.backends.cudnn.allow_tf32 = False"

    return f"PyTorch rounds convolutions to TF32 unless the script sets {switch}"


def frozen_in_mixed_precision(request: Request) -> bool:
    """Whether there are frozen weights, which were measured in half precision, and trained ones in
    float32."""
    return request.config.precision.endswith("-mixed") and bool(request.config.lora_rank)


def whole_blocks(request: Request, path: str) -> ToolKeys:
    """`activation_checkpointing` of a tool that checkpoints every block or none."""
    knob = "activation_checkpointing"
    value = request.config.activation_checkpointing
    keys = {path: checkpoints_blocks(value)}
    if value in ("none", "full"):
        return ToolKeys(keys)
    if value.startswith("budget-"):
        instead = f"{request.title} has no budgets, and keeps more for the backward"
        return request.keys(knob, keys, instead, may_not_fit=True)

    return request.keys(knob, keys, WHOLE_BLOCKS.format(request.title))


def whole_blocks_of_trainer(request: Request, keys: Mapping[str, Any]) -> ToolKeys:
    """The same of a tool built on Trainer, with its keys."""
    knob = "activation_checkpointing"
    value = request.config.activation_checkpointing
    if value.startswith("budget-"):
        return ToolKeys(keys, keywords(request, knob).deviations)
    if value not in ("none", "full"):
        return request.keys(knob, keys, WHOLE_BLOCKS.format(request.title))

    return ToolKeys(keys)


def offload_of_blocks(
    request: Request,
    off: Mapping[str, Any],
    on: Mapping[str, Any],
    otherwise: str,
    *,
    slower: str | None = None,
) -> ToolKeys:
    """`activation_offload` of a tool that offloads checkpointed blocks only.

    Args:
        otherwise: what it does without checkpointing.
        slower: how it deviates with it; None: it does not.
    """
    if request.config.activation_offload == "none":
        return ToolKeys(off)
    if checkpoints_blocks(request.config.activation_checkpointing):
        return request.keys("activation_offload", on, slower)

    return request.keys("activation_offload", off, otherwise, may_not_fit=True)


def optimizer_class(
    request: Request,
    path: str,
    options: str,
    foreach: Mapping[str, Any] | None = None,
) -> ToolKeys:
    """`optimizer` by its class; `foreach` are further options of `adamw-foreach`."""
    value = str(request.config.optimizer)
    is_narrow = value in OF_BF16
    instead = None
    if is_narrow:
        instead = f"{request.title} {OF_BF16[value]}"
    elif value not in _OPTIMIZERS:
        unknown = "it is given no Muon" if value == "muon" else "your own is not known here"
        instead = f"{unknown}; torch's AdamW is named in its place"

    learning = default_hyperparameters(request.config)
    given = {"lr": learning.lr, "weight_decay": learning.weight_decay}
    if value == "adamw-foreach":
        given |= foreach or {}
    name, own = _OPTIMIZERS.get(value, _OPTIMIZERS["adamw-8bit-sr" if is_narrow else "adamw"])
    given |= own

    keys: dict[str, Any] = {path: name}
    for option, setting in given.items():
        keys[f"{options}.{option}"] = setting
    return request.keys("optimizer", keys, instead, may_not_fit=not is_narrow)


def compile_by_default(request: Request) -> ToolKeys:
    """`compile` of a tool that compiles block by block, as measured, in the default mode only."""
    value = request.config.compile
    instead = None
    if value not in ("none", "default"):
        instead = f"{request.title} compiles in its default mode, without timing several kernels"

    return request.keys("compile", {"compile": value != "none"}, instead)


def compile_by_blocks(request: Request, prefix: str, environment: str) -> ToolKeys:
    """`compile` of a tool on accelerate, which compiles block by block, as measured, if the
    environment says so."""
    keys = dict(arguments(request, "compile", prefix).keys)
    if request.config.compile != "none":
        keys[f"{environment}.ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "1"

    return ToolKeys(keys)


def adapter(path: str, value: Callable[[Request], Any]) -> Share:
    """A key that exists only beside adapters."""

    def share(request: Request) -> ToolKeys:
        if not request.config.lora_rank:
            return ToolKeys()
        return ToolKeys({path: value(request)})

    return share


def by_kind(request: Request) -> str | None:
    """How a tool deviates that knows kinds of layers alone, given names of them."""
    if request.config.lora_targets in (*LORA_KINDS, None):
        return None
    return f"{request.title} takes no names of layers, and puts adapters beside all linear layers"


def loader_of_data(source: ExportSource) -> str | None:
    """What the datasets library calls the format of the file that a search knew; None where a tool
    cannot read it."""
    if source.data is None or source.form not in LEARNT:
        return None
    return _LOADERS.get(PurePath(source.data).suffix.lower())


def lora_rank(
    request: Request,
    path: str,
    beside: Mapping[str, Any] | None = None,
    without: Mapping[str, Any] | None = None,
) -> ToolKeys:
    """`lora_rank`, with further keys beside adapters and without them."""
    rank = request.config.lora_rank
    if not rank:
        return ToolKeys(without or {})

    return ToolKeys({**(beside or {}), path: rank})


def alpha(request: Request) -> Any:
    """The scale of adapters; null in the config means the usual one."""
    return request.config.lora_alpha or USUAL_ALPHA


def lora_alpha(request: Request, path: str = "lora_alpha") -> ToolKeys:
    """`lora_alpha` of a tool that takes any number."""
    return ToolKeys({path: alpha(request)})


def whole_alpha(request: Request, path: str = "lora_alpha") -> ToolKeys:
    """`lora_alpha` of a tool that takes whole numbers only."""
    whole = max(1, round(alpha(request)))
    instead = None
    if whole != alpha(request):
        instead = f"{request.title} takes whole numbers, here {whole}"

    return request.keys("lora_alpha", {path: whole}, instead)


def lora_dropout(request: Request, path: str = "lora_dropout") -> ToolKeys:
    """`lora_dropout`, 0 where the config has none."""
    return ToolKeys({path: request.config.lora_dropout or 0.0})


def kinds_of_adapter(
    dora: str = "use_dora",
    rslora: str = "use_rslora",
    **plus: str,
) -> dict[str, Share]:
    """The rows of DoRA and rsLoRA, and with `plus` of LoRA+ (`lora_plus`), by the path of each."""
    return values(lora_dora=dora, lora_rslora=rslora, **plus)


def trainer_case(source: ExportSource) -> TrainerCase:
    """The config as `trainer` reads it; flash-attn is taken to be there if it was when this was
    measured."""
    return TrainerCase(
        config=source.config,
        device=source.device,
        task=task_named(source.task),
        effective_batch_size=source.effective_batch_size,
        flash_attn="flash-attn" in source.versions,
    )


def keywords(request: Request, knob: str) -> TrainerKeywords:
    """What Trainer, from_pretrained, LoraConfig and BitsAndBytesConfig are given for one knob."""
    return TRAINER_KNOBS[knob](trainer_case(request.source))


def arguments(request: Request, knob: str, prefix: str = "") -> ToolKeys:
    """The keys of a knob that TrainingArguments alone hold."""
    trainer = keywords(request, knob)
    values = {**_TRAINER_OFF.get(knob, {}), **trainer.arguments}
    keys = {f"{prefix}{name}": value for name, value in values.items()}

    return ToolKeys(keys, trainer.deviations)


def trainer_arguments(*knobs: str, prefix: str = "") -> dict[str, Share]:
    """The rows of knobs that TrainingArguments alone hold."""
    return {knob: partial(arguments, knob=knob, prefix=prefix) for knob in knobs}


def attention(request: Request, prefix: str = "") -> ToolKeys:
    """The keys of `attention`, an argument of from_pretrained."""
    trainer = keywords(request, "attention")
    implementation = trainer.model.get("attn_implementation", "sdpa")

    return ToolKeys({f"{prefix}attn_implementation": implementation}, trainer.deviations)


def named_before(keys: Mapping[str, Any]) -> dict[str, Any]:
    """TrainingArguments by their names before RENAMED."""
    return {
        name.replace("activation_checkpointing", "gradient_checkpointing"): value
        for name, value in keys.items()
    }


def of_task(request: Request) -> dict[str, Any]:
    """The keys by which the tool is told of the task; none of language models, which it is for."""
    name = request.title.lower().replace("-", "")
    return dict(task_named(request.source.task).tools.get(name, {}))


def all_logits(request: Request) -> str | None:
    """What a tool does instead of a chunked loss, in tasks whose loss is not the model's own."""
    if request.config.loss != "chunked":
        return None
    return f"{request.title} holds the logits of all tokens, in more memory than measured"


def liger_with_its_loss(key: str) -> dict[str, Share]:
    """The rows of the loss and of kernels, of a tool whose one key switches Liger's kernels and its
    fused loss on."""

    def keys(request: Request) -> dict[str, Any]:
        return {key: request.config.kernels == "liger" or request.config.loss == "fused"}

    def loss(request: Request) -> ToolKeys:
        title = request.title
        value = request.config.loss
        has_kernels = request.config.kernels == "liger"
        if request.source.task not in LANGUAGE_MODELS:
            return request.keys(
                "loss",
                keys(request),
                all_logits(request),
                may_not_fit=True,
            )

        if value == "fused" and not has_kernels:
            instead = f"{title} switches Liger's other kernels on with it"
        elif value != "fused" and has_kernels:
            instead = f"{title} switches Liger's fused loss on with its kernels, {_NEVER_ALL}"
        elif value == "chunked":
            instead = f"{title} holds the logits of all tokens; with {key} it never does"
        else:
            return ToolKeys(keys(request), as_measured=has_kernels)

        may_not_fit = value == "chunked" and not has_kernels
        return request.keys("loss", keys(request), instead, may_not_fit=may_not_fit)

    def kernels(request: Request) -> ToolKeys:
        return ToolKeys(keys(request), as_measured=request.config.loss == "fused")

    return {"loss": loss, "kernels": kernels}


def reference(request: Request, key: str | None) -> ToolKeys:
    """Where the answers of the model before training are from.

    All tools ask the model without its adapters, or keep a copy of one that is trained whole.

    Args:
        key: has them computed before training; None: the tool has none.
    """
    value = request.config.reference
    adapted = bool(request.config.lora_rank)
    if value is None:
        return ToolKeys()

    keys = {}
    if key is not None:
        keys[key] = value == "precomputed"
    without = "asks the model without its adapters"
    if value == "precomputed" and key is None:
        kept = without if adapted else "keeps a copy of the model"
        what = f"{kept} in every step, in more time"
    elif value == "offloaded" and not adapted:
        what = "keeps the copy on the device, in more memory"
    elif value in COPIED and adapted:
        what = f"{without}, in less memory"
    else:
        return ToolKeys(keys, as_measured=True)

    instead = f"{request.title} {what} than measured"
    may_not_fit = value in ("precomputed", "offloaded") and not adapted
    return request.keys("reference", keys, instead, may_not_fit=may_not_fit)
