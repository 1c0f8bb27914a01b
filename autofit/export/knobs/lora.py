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
_ATTENTION = 'targets = {name for name in linear if "attn" in name or "attention" in name}'
_ALL = 'target_modules="all-linear"'
_BUT_ATTENTION = 'exclude_modules=r"(?!.*att(n|ention)).*"'
_TARGETS = ("attention", "all-linear", "all-linear+head")


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
    listed = _listed(case, str(targets)) if case.classifies or targets == "all-linear+head" else ()
    transposed = bool(listed) and case.model_config["model_type"] in TRANSPOSED
    return Fragments(
        imports=("from peft import LoraConfig, get_peft_model", *(_LISTED if transposed else ())),
        constants=(f'LORA = {{"r": {rank}, "lora_alpha": {alpha}, "lora_dropout": {dropout}}}',),
        adapt=(
            f"# lora_rank: {rank}, lora_targets: {targets}{_WHOLE if case.classifies else ''}",
            *listed,
            "torch.manual_seed(torch.initial_seed())  # for adapters, whatever was drawn before",
            *_adapted(case, str(targets), listed=bool(listed)),
        ),
        save=(
            "if args.weights:",
            "    model.save_pretrained(args.output, save_embedding_layers=False)",
            "else:  # adapters say nothing without the random weights below them",
            "    model.merge_and_unload().save_pretrained(args.output)",
        ),
    )


def _adapted(case: Case, targets: str, *, listed: bool) -> tuple[str, ...]:
    """Lines that attach the adapters."""
    if not listed and targets == "attention":
        return (f"lora = LoraConfig({_ALL}, {_BUT_ATTENTION}, **LORA)", "model = get_peft_model(model, lora)")
    arguments = f"{'target_modules=targets' if listed else _ALL}{', modules_to_save=heads' if case.classifies else ''}"
    return (f"model = get_peft_model(model, LoraConfig({arguments}, **LORA))",)


def _listed(case: Case, targets: str) -> tuple[str, ...]:
    """Lines that name the layers which get adapters."""
    kinds = "(Linear, Conv1D)" if case.model_config["model_type"] in TRANSPOSED else "torch.nn.Linear"
    linear = f"{{n for n, m in model.named_modules() if isinstance(m, {kinds})}}"
    if not case.classifies:
        return (f"targets = {linear}",)
    return (f"linear = {linear}", _HEADS, _ATTENTION if targets == "attention" else "targets = linear - heads")
