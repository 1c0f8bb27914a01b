"""attention, kernels, activation_checkpointing, compile: how the blocks run."""

from autofit.core.config import Config
from autofit.core.some_blocks import SomeBlocks
from autofit.export.fragments import Case, Fragments
from autofit.export.template import import_from, template

BLOCKS = "[m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]"
_LISTED = f"blocks = {BLOCKS}"
BLOCK_CLASS = "from transformers.modeling_layers import GradientCheckpointingLayer"


def attention(case: Case) -> Fragments | None:
    """How softmax(QK)V is computed."""
    value = case.config.attention
    if value == "sdpa":  # the default of transformers
        return Fragments()
    set_to = 'model.set_attn_implementation("{}")  # attention: {}'
    if value == "eager":
        return Fragments(adapt=(set_to.format("eager", value),))
    if value != "flash":
        return None
    if "flash-attn" in case.versions:
        return Fragments(
            packages=("flash-attn",), adapt=(set_to.format("flash_attention_2", value),)
        )

    return Fragments(  # around the backward too: a checkpointed block must take the same path when it is recomputed
        imports=(import_from("torch.nn.attention", "SDPBackend", "sdpa_kernel"),),
        around_step=("sdpa_kernel(SDPBackend.FLASH_ATTENTION)  # attention: flash",),
    )


def kernels(case: Case) -> Fragments | None:
    """Liger's kernels for this kind of model, but not its losses."""
    if case.config.kernels != "liger":
        return None
    return Fragments(
        imports=("from liger_kernel.transformers import _apply_liger_kernel_to_instance as liger",),
        adapt=(
            "liger(model=model, cross_entropy=False, fused_linear_cross_entropy=False)  # kernels: liger",
        ),
    )


def activation_checkpointing(case: Case) -> Fragments | None:
    """What the blocks save for the backward."""
    value = case.config.activation_checkpointing
    comment = f"# activation_checkpointing: {value}"
    if value in ("budget-0.25", "budget-0.5", "budget-0.75"):
        setting = (
            f"torch._functorch.config.activation_memory_budget = {value.removeprefix('budget-')}"
        )
        start = (f"{comment} of what the compiler would keep", setting)
        if case.config.compile == "none":
            return None
        return Fragments(imports=("import torch._functorch.config",), start=start)

    if value == "full":
        return Fragments(adapt=(f"{_enable(case)}  {comment}",))
    if value == "alternate":
        others = (
            _LISTED,
            "for block in blocks[::-2]:",
            "    block.gradient_checkpointing = False",
        )
        words = f"{comment}, every second block keeps only its input"
        return Fragments(imports=(BLOCK_CLASS,), adapt=(words, _enable(case), *others))

    some = SomeBlocks.of(value)
    if some and some.rest == "none":
        words = f"{comment}, of which these keep only their input"
        others = (
            _LISTED,
            f"for block in blocks[{some.number}:]:",
            "    block.gradient_checkpointing = False",
        )
        return Fragments(imports=(BLOCK_CLASS,), adapt=(words, _enable(case), *others))

    if some is None and value != "selective":
        return None

    names = {"CheckpointPolicy", "create_selective_checkpoint_contexts"}
    first: tuple[str, ...] = ()
    if some:
        names.add("checkpoint")
        first = (
            _LISTED,
            f"for block in blocks[:{some.number}]:  {comment}",
            "    block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)",
        )

    keep = "keep = partial(create_selective_checkpoint_contexts, keep_products)"

    return Fragments(
        standard=("from functools import partial",),
        imports=(
            import_from("torch.utils.checkpoint", *sorted(names)),
            *((BLOCK_CLASS,) if some else ()),
        ),
        functions=(template("selective"),),
        adapt=(keep, _enable(case, '{"use_reentrant": False, "context_fn": keep}'), *first),
    )


def _enable(case: Case, given: str = "") -> str:
    """The call that switches checkpointing on for all blocks. transformers 5.23 renamed the method;
    the older name warns there, and is to go with version 6."""
    version = [
        int(part) for part in case.versions.get("transformers", "").split(".")[:2] if part.isdigit()
    ]
    older = version and version < [5, 23]
    method = "gradient_checkpointing_enable" if older else "activation_checkpointing_enable"

    return f"model.{method}({given})"


def lists_blocks(config: Config) -> bool:
    """Whether the fragments of activation_checkpointing have made `blocks`."""
    value = config.activation_checkpointing
    return value == "alternate" or SomeBlocks.of(value) is not None


def compiled(case: Case) -> Fragments | None:
    """torch.compile block by block, or of the whole model if it repeats none."""
    value = case.config.compile
    if value not in ("default", "max-autotune-no-cudagraphs"):
        return None
    listed = lists_blocks(case.config)
    mode = "" if value == "default" else f', mode="{value}"'

    return Fragments(
        imports=() if listed else (BLOCK_CLASS,),
        adapt=(
            *(() if listed else (_LISTED,)),
            "torch._dynamo.config.recompile_limit = 8 * max(1, len(blocks))  # past it, nothing is compiled",
            "torch._dynamo.config.accumulated_recompile_limit = max(256, 8 * len(blocks))",
            f"for block in blocks or [model]:  # compile: {value}",
            f"    block.forward = torch.compile(block.forward{mode})",
        ),
    )
