"""How the blocks run: attention, kernels, activation_checkpointing, compile."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments
from autofit.export.template import import_from, template

_BLOCKS = ("blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]",)
_BLOCK_CLASS = "from transformers.modeling_layers import GradientCheckpointingLayer"
_BUDGET = "budget-"


def attention(case: Case) -> Fragments | None:
    """How softmax(QK)V is computed."""
    value = case.config.get("attention")
    if value in (None, "sdpa"):  # what transformers takes by itself
        return Fragments()
    if value == "eager":
        return Fragments(adapt=(_attention("eager", value),))
    if value != "flash":
        return None
    if "flash-attn" in case.versions:
        return Fragments(packages=("flash-attn",), adapt=(_attention("flash_attention_2", value),))
    return Fragments(  # around the backward too: a checkpointed block must take the same path when it is computed again
        imports=(import_from("torch.nn.attention", "SDPBackend", "sdpa_kernel"),),
        around_step=("sdpa_kernel(SDPBackend.FLASH_ATTENTION)  # attention: flash",),
    )


def _attention(implementation: str, value: str) -> str:
    return f'model.set_attn_implementation("{implementation}")  # attention: {value}'


def kernels(case: Case) -> Fragments | None:
    """Liger's kernels for this kind of model, but not its losses."""
    value = case.config.get("kernels", "none")
    if value == "none":
        return Fragments()
    if value != "liger":
        return None
    return Fragments(
        imports=("from liger_kernel.transformers import _apply_liger_kernel_to_instance as liger",),
        adapt=("liger(model=model, cross_entropy=False, fused_linear_cross_entropy=False)  # kernels: liger",),
    )


def activation_checkpointing(case: Case) -> Fragments | None:
    """What the blocks keep for the backward."""
    value = str(case.config.get("activation_checkpointing", "none"))
    if value == "none":
        return Fragments()
    if value in ("budget-0.25", "budget-0.5", "budget-0.75"):
        return _budget(value.removeprefix(_BUDGET)) if _is_compiled(case) else None
    if value == "full":
        words = "# activation_checkpointing: full, each block keeps only its input"
        return Fragments(adapt=(words, _enabled(case)))
    if value == "alternate":
        others = (*_BLOCKS, "for block in blocks[::-2]:", "    block.gradient_checkpointing = False")
        words = "# activation_checkpointing: alternate, every second block keeps only its input"
        return Fragments(imports=(_BLOCK_CLASS,), adapt=(words, _enabled(case), *others))
    if value != "selective":
        return None
    keep = "keep = partial(create_selective_checkpoint_contexts, keep_products)"
    return Fragments(
        standard=("from functools import partial",),
        imports=(import_from("torch.utils.checkpoint", "CheckpointPolicy", "create_selective_checkpoint_contexts"),),
        functions=(template("selective"),),
        adapt=(keep, _enabled(case, ', "context_fn": keep')),
    )


def _enabled(case: Case, more: str = "") -> str:
    """The call that switches checkpointing on for all blocks."""
    method = _enabling_method(case.versions.get("transformers", ""))
    return f'model.{method}({{"use_reentrant": False{more}}})'


def _enabling_method(version: str) -> str:
    """Its name in transformers 5.23 and later; the older one warns there, and is to go with version 6."""
    known = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return "gradient_checkpointing_enable" if known and known < [5, 23] else "activation_checkpointing_enable"


def _budget(share: str) -> Fragments:
    words = f"# activation_checkpointing: budget-{share} of what the compiler would keep"
    return Fragments(
        imports=("import torch._functorch.config",),
        start=(words, f"torch._functorch.config.activation_memory_budget = {share}"),
    )


def compiled(case: Case) -> Fragments | None:
    """torch.compile block by block, or of the whole model where it repeats none."""
    if not _is_compiled(case):
        return Fragments()
    value = str(case.config["compile"])
    if value not in ("default", "max-autotune-no-cudagraphs"):
        return None
    known = case.config.get("activation_checkpointing") == "alternate"
    mode = "" if value == "default" else f', mode="{value}"'
    return Fragments(
        imports=() if known else (_BLOCK_CLASS,),
        adapt=(
            *(() if known else _BLOCKS),
            "torch._dynamo.config.recompile_limit = 8 * max(1, len(blocks))  # past it, nothing is compiled",
            "torch._dynamo.config.accumulated_recompile_limit = max(256, 8 * len(blocks))",
            f"for block in blocks or [model]:  # compile: {value}",
            f"    block.forward = torch.compile(block.forward{mode})",
        ),
    )


def _is_compiled(case: Case) -> bool:
    return case.config.get("compile", "none") != "none"
