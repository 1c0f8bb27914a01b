"""Keys that several tools share: each function makes the share of one knob, with names and words filled in."""

from collections.abc import Callable, Mapping
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export.tool import Request, Share, ToolKeys
from autofit.export.trainer import CHECKPOINTED

# Sentences with the tool's title left open.
TF32 = "{} multiplies in float32 unless torch.set_float32_matmul_precision('high') is called"
FP8 = "{} multiplies in bfloat16 here, which is slower than measured"
WHOLE_BLOCKS = "{} checkpoints every block whole, with less memory and more time than measured"
LIGHTNING_PRECISION = {
    "fp32": "32-true",
    "tf32": "32-true",
    "bf16": "bf16-true",
    "fp8": "bf16-true",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
}
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("torch.optim.AdamW", {"fused": True}),
    "adamw-foreach": ("torch.optim.AdamW", {"foreach": True}),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "adamw-4bit": ("torchao.optim.AdamW4bit", {}),
    "adamw-fp8": ("torchao.optim.AdamWFp8", {}),
    "adafactor": ("torch.optim.Adafactor", {}),
    "sgd": ("torch.optim.SGD", {}),
}
_MISSING = {  # what many tools do without a knob; after the title
    "activation_offload": "keeps activations on the device",
    "optimizer_offload": "keeps the optimizer's state on the device",
    "optimizer_in_backward": "holds all gradients until the update",
    "parameter_offload": "keeps frozen weights on the device",
    "attention": "calls PyTorch's fused attention, which chooses by itself",
    "kernels": "has none of Liger's, and keeps more for the backward",
}


def value_of(knob: str, path: str | None = None) -> Share:
    """The knob's value, as it is; `path`: default: the knob's own name."""
    return lambda request: ToolKeys({path or knob: request.config[knob]})


def missing(title: str, *knobs: str, may_not_fit: bool = True, **instead: str) -> dict[str, Share]:
    """The rows of knobs that the tool has nothing for; `instead` is what it does, if not what many tools do."""

    def row(knob: str, what: str) -> Share:
        def share(request: Request) -> ToolKeys:
            on = request.config[knob] not in (None, request.source.off.get(knob))
            return request.keys(knob, {}, what if on else None, may_not_fit=may_not_fit)

        return share

    whats = {**{knob: f"{title} {_MISSING[knob]}" for knob in knobs}, **instead}
    return {knob: row(knob, what) for knob, what in whats.items()}


def global_batch(path: str) -> Share:
    """The effective batch, from which the tool works out its accumulation."""

    def share(request: Request) -> ToolKeys:
        micro, steps = request.config["micro_batch_size"], request.config["gradient_accumulation_steps"]
        return ToolKeys({path: int(micro or 1) * int(steps or 1)})

    return share


def convolutions(request: Request) -> str | None:
    """How a tool that leaves the rounding of fp32 to PyTorch deviates on models with convolutions."""
    on_a_card = request.source.device == "cuda" and request.text("precision") == "fp32"
    if not on_a_card or request.source.task not in ("image-classification", "custom"):
        return None
    return "PyTorch rounds convolutions to TF32 unless the script sets torch.backends.cudnn.allow_tf32 = False"


def whole_blocks(title: str, path: str) -> Share:
    """`activation_checkpointing` of a tool that checkpoints every block or none."""
    knob = "activation_checkpointing"

    def share(request: Request) -> ToolKeys:
        value = request.text(knob)
        keys = {path: value in CHECKPOINTED}
        if value.startswith("budget-"):
            more = f"{title} has no budgets, and keeps more for the backward"
            return request.keys(knob, keys, more, may_not_fit=True)
        return request.keys(knob, keys, None if value in ("none", "full") else WHOLE_BLOCKS.format(title))

    return share


def offload_of_blocks(
    off: Mapping[str, Any], on: Mapping[str, Any], otherwise: str, *, slower: str | None = None
) -> Share:
    """`activation_offload` of a tool that offloads checkpointed blocks only; `otherwise` is what it does without."""
    knob = "activation_offload"

    def share(request: Request) -> ToolKeys:
        if request.text(knob) == "none":
            return ToolKeys(off)
        if request.text("activation_checkpointing") in CHECKPOINTED:
            return request.keys(knob, on, slower)
        return request.keys(knob, off, otherwise, may_not_fit=True)

    return share


def optimizer_class(path: str, options: str, foreach: Mapping[str, Any] | None = None) -> Share:
    """`optimizer` by its class; `foreach` are further options of `adamw-foreach`."""

    def share(request: Request) -> ToolKeys:
        value = request.text("optimizer")
        name, own = _OPTIMIZERS.get(value, _OPTIMIZERS["adamw"])
        learning = Hyperparameters()
        given = {
            "lr": learning.lr,
            "weight_decay": learning.weight_decay,
            **(foreach or {} if value == "adamw-foreach" else {}),
            **own,
        }
        keys = {path: name, **{f"{options}.{option}": each for option, each in given.items()}}
        instead = None if value in _OPTIMIZERS else "your own is not known here; torch's AdamW is named in its place"
        return request.keys("optimizer", keys, instead, may_not_fit=True)

    return share


def compile_by_default(title: str) -> Share:
    """`compile` of a tool that compiles block by block, as measured, in the default mode only."""

    def share(request: Request) -> ToolKeys:
        value = request.text("compile")
        instead = f"{title} compiles in its default mode, without timing several kernels"
        return request.keys("compile", {"compile": value != "none"}, None if value in ("none", "default") else instead)

    return share


def adapter(path: str, value: Callable[[Request], Any]) -> Share:
    """A key that exists only beside adapters."""
    return lambda request: ToolKeys({path: value(request)} if request.config["lora_rank"] else {})


def lora_rank(path: str, *, beside: Mapping[str, Any] | None = None, without: Mapping[str, Any] | None = None) -> Share:
    """`lora_rank`, with further keys beside adapters and without them."""

    def share(request: Request) -> ToolKeys:
        rank = request.config["lora_rank"]
        return ToolKeys({**(beside or {}), path: rank} if rank else without or {})

    return share


def lora_alpha(path: str = "lora_alpha", kind: Callable[[Any], Any] = lambda alpha: alpha) -> Share:
    return lambda request: ToolKeys({path: kind(_alpha(request))})


def whole_alpha(title: str, path: str = "lora_alpha") -> Share:
    """`lora_alpha` of a tool that takes whole numbers only."""

    def share(request: Request) -> ToolKeys:
        alpha = _alpha(request)
        whole = max(1, round(alpha))
        instead = None if whole == alpha else f"{title} takes whole numbers, here {whole}"
        return request.keys("lora_alpha", {path: whole}, instead)

    return share


def _alpha(request: Request) -> Any:
    """The scale of adapters; null in the config means twice the rank."""
    return request.config["lora_alpha"] or 2 * int(request.config["lora_rank"] or 0)


def lora_dropout(path: str = "lora_dropout") -> Share:
    return lambda request: ToolKeys({path: request.config["lora_dropout"] or 0.0})
