"""LoRA by peft: lora_rank, with lora_targets, lora_alpha and lora_dropout."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments

_HEADS = (
    "# The new head of a classifier starts from random weights: it is trained whole.",
    "heads = [",
    "    name",
    "    for name, module in model.named_children()",
    '    if name in ("score", "classifier") and isinstance(module, torch.nn.Linear)',
    "]",
)
_TARGETS = (
    "targets = [",
    "    name",
    "    for name, module in model.named_modules()",
    "    if isinstance(module, (torch.nn.Linear, Conv1D))",
)
_CONV1D = "from transformers.pytorch_utils import Conv1D"  # GPT-2's transposed Linear


def lora(case: Case) -> Fragments | None:
    """Adapters beside frozen weights, in the dtype that `precision` trains in."""
    config = case.config
    rank, targets = config.get("lora_rank"), config.get("lora_targets")
    if not rank:
        return Fragments()
    heads, condition = (_HEADS, "name not in heads") if case.classifies else ((), "")
    named = "targets"
    if targets == "attention":
        condition = '("attn" in name or "attention" in name)'
    elif targets == "all-linear+head":
        heads, condition = (), ""
    elif targets != "all-linear":
        return None
    elif not case.classifies:
        named = '"all-linear"'  # peft leaves out the output embedding by itself
    listed = () if named != "targets" else (*_TARGETS, *((f"    and {condition}",) if condition else ()), "]")
    keep = ", autocast_adapter_dtype=False" if config.get("precision") in ("bf16", "fp8") else ""
    return Fragments(
        imports=("from peft import LoraConfig, get_peft_model", *((_CONV1D,) if listed else ())),
        adapt=(
            *heads,
            *listed,
            "lora = LoraConfig(",
            f"    r={rank},",
            f"    lora_alpha={config.get('lora_alpha') or 2 * int(rank)},",
            f"    lora_dropout={config.get('lora_dropout') or 0.0},",
            f"    target_modules={named},",
            *(("    modules_to_save=heads,",) if heads else ()),
            ")",
            f"model = get_peft_model(model, lora{keep})",
            *_trained_in(case, heads=bool(heads)),
        ),
        save=(
            "if args.weights:",
            "    model.save_pretrained(args.output, save_embedding_layers=False)",
            "else:  # adapters say nothing without the random weights below them",
            "    model.merge_and_unload().save_pretrained(args.output)",
        ),
    )


def _trained_in(case: Case, *, heads: bool) -> tuple[str, ...]:
    """Where peft leaves it in another dtype: new heads in that of frozen weights, adapters beside int8 in float32."""
    precision = str(case.config.get("precision"))
    if precision.endswith("-mixed") and heads:
        dtype = "float32"
    elif precision == "bf16" and case.config.get("quantization", "none") != "none":
        dtype = "bfloat16"
    else:
        return ()
    return (
        "for parameter in model.parameters():",
        "    if parameter.requires_grad:",
        f"        parameter.data = parameter.data.to(torch.{dtype})",
    )
