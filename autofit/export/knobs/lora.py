"""LoRA by peft: lora_rank, with lora_targets, lora_alpha and lora_dropout."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments

# Kinds of models with transposed linear layers, a class of their own in transformers.
TRANSPOSED = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
_LISTED = (
    "from torch.nn import Linear",
    "from transformers.pytorch_utils import Conv1D",  # its transposed Linear
)
_HEADS = 'heads = {n for n in linear if not n.startswith(f"{model.base_model_prefix}.")}'
_WHOLE = "; the head is new, trained whole"
_TARGETS = {
    "attention": 'targets = {name for name in linear if "attn" in name or "attention" in name}',
    "all-linear": "targets = linear",
    "all-linear+head": "targets = linear",
}


def lora(case: Case) -> Fragments | None:
    """Adapters beside frozen weights; `precision` says in which formats both are."""
    config = case.config
    rank, targets = config.get("lora_rank"), config.get("lora_targets") or "all-linear"
    if not rank:
        return Fragments()
    if targets not in _TARGETS:
        return None
    if case.classifies and targets == "all-linear+head":
        targets = "all-linear"  # a classifier's new head is trained whole whatever the targets
    alpha, dropout = config.get("lora_alpha") or 2 * int(rank), config.get("lora_dropout") or 0.0
    # peft leaves out the output embedding by itself, but not every head of a classifier.
    listed = _listed(case, str(targets)) if case.classifies or targets != "all-linear" else ()
    transposed = bool(listed) and case.model_config["model_type"] in TRANSPOSED
    arguments = "target_modules=targets, " if listed else 'target_modules="all-linear", '
    arguments += "modules_to_save=heads, " if case.classifies else ""
    return Fragments(
        imports=("from peft import LoraConfig, get_peft_model", *(_LISTED if transposed else ())),
        constants=(f'LORA = {{"r": {rank}, "lora_alpha": {alpha}, "lora_dropout": {dropout}}}',),
        adapt=(
            f"# lora_rank: {rank}, lora_targets: {targets}{_WHOLE if case.classifies else ''}",
            *listed,
            "torch.manual_seed(torch.initial_seed())  # for adapters, whatever was drawn before",
            *(
                (f"lora = LoraConfig({arguments}**LORA)", "model = get_peft_model(model, lora)")
                if case.classifies
                else (f"model = get_peft_model(model, LoraConfig({arguments}**LORA))",)
            ),
        ),
        save=(
            "if args.weights:",
            "    model.save_pretrained(args.output, save_embedding_layers=False)",
            "else:  # adapters say nothing without the random weights below them",
            "    model.merge_and_unload().save_pretrained(args.output)",
        ),
    )


def _listed(case: Case, targets: str) -> tuple[str, ...]:
    """Lines that name the layers which get adapters."""
    kinds = "(Linear, Conv1D)" if case.model_config["model_type"] in TRANSPOSED else "torch.nn.Linear"
    linear = f"linear = {{n for n, m in model.named_modules() if isinstance(m, {kinds})}}"
    if not case.classifies:
        return (linear, _TARGETS[targets])
    return (linear, _HEADS, "targets = linear - heads" if targets == "all-linear" else _TARGETS[targets])
