"""How the blocks run: attention, kernels, activation_checkpointing, compile."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments
from autofit.export.template import import_from, template

_BLOCKS = (
    "blocks = [",
    "    module",
    "    for module in model.modules()",
    "    if isinstance(module, GradientCheckpointingLayer)",
    "]",
)
_BLOCK_CLASS = "from transformers.modeling_layers import GradientCheckpointingLayer"
_BUDGET = "budget-"


def attention(case: Case) -> Fragments | None:
    """How softmax(QK)V is computed."""
    value = case.config.get("attention", "sdpa")
    if value == "sdpa":  # what transformers takes by itself
        return Fragments()
    if value == "eager":
        return Fragments(settings={"attn_implementation": '"eager"'})
    if value != "flash":
        return None
    if "flash-attn" in case.versions:
        return Fragments(packages=("flash-attn",), settings={"attn_implementation": '"flash_attention_2"'})
    return Fragments(  # around the backward too: a checkpointed block must take the same path when it is computed again
        imports=(import_from("torch.nn.attention", "SDPBackend", "sdpa_kernel"),),
        settings={"attn_implementation": '"sdpa"'},
        around_step=("sdpa_kernel(SDPBackend.FLASH_ATTENTION)",),
    )


def kernels(case: Case) -> Fragments | None:
    """Liger's kernels for this kind of model, but not its losses."""
    value = case.config.get("kernels", "none")
    if value == "none":
        return Fragments()
    if value != "liger":
        return None
    return Fragments(
        imports=("from liger_kernel.transformers import _apply_liger_kernel_to_instance",),
        adapt=(
            "_apply_liger_kernel_to_instance(",
            f"    model={'model.get_base_model()' if case.lora else 'model'},",
            "    cross_entropy=False,",
            "    fused_linear_cross_entropy=False,",
            ")",
        ),
    )


def activation_checkpointing(case: Case) -> Fragments | None:
    """What the blocks keep for the backward."""
    value = str(case.config.get("activation_checkpointing", "none"))
    if value == "none":
        return Fragments()
    if value in ("budget-0.25", "budget-0.5", "budget-0.75"):
        return _budget(value.removeprefix(_BUDGET)) if _is_compiled(case) else None
    if value == "full":
        why = "Each block keeps only its input and computes the rest again in the backward pass."
        return Fragments(adapt=_enabled(why))
    if value == "alternate":
        why = "Every second block keeps only its input and computes the rest again."
        others = (*_BLOCKS, "for block in blocks[::2]:", "    block.gradient_checkpointing = False")
        return Fragments(imports=(_BLOCK_CLASS,), adapt=(*_enabled(why), *others))
    if value != "selective":
        return None
    why = "Blocks keep what is dear to compute, and compute the rest again."
    return Fragments(
        standard=("from functools import partial",),
        imports=(import_from("torch.utils.checkpoint", "CheckpointPolicy", "create_selective_checkpoint_contexts"),),
        functions=(template("selective"),),
        adapt=_enabled(
            why,
            (
                "contexts = partial(create_selective_checkpoint_contexts, keep_products)",
                'options = {"use_reentrant": False, "context_fn": contexts}',
            ),
        ),
    )


def _enabled(why: str, options: tuple[str, ...] = ('options = {"use_reentrant": False}',)) -> tuple[str, ...]:
    """Checkpointing switched on for all blocks."""
    return (
        f"# {why}",
        *options,
        'if hasattr(model, "activation_checkpointing_enable"):',
        "    model.activation_checkpointing_enable(options)",
        "else:  # its name in older transformers",
        "    model.gradient_checkpointing_enable(options)",
    )


def _budget(share: str) -> Fragments:
    words = "# The share of what the compiler would keep for the backward that it may keep."
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
        imports=("import torch._dynamo", *(() if known else (_BLOCK_CLASS,))),
        adapt=(
            *(() if known else _BLOCKS),
            "# Blocks of one class share compiled code; past these limits it is not used at all.",
            "torch._dynamo.config.recompile_limit = 8 * max(1, len(blocks))",
            "torch._dynamo.config.accumulated_recompile_limit = max(256, 8 * len(blocks))",
            "for block in blocks or [model]:",
            f"    block.forward = torch.compile(block.forward{mode})",
        ),
    )


def _is_compiled(case: Case) -> bool:
    return case.config.get("compile", "none") != "none"
