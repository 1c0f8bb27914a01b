"""lora_rank, lora_targets, lora_alpha and lora_dropout: LoRA by peft."""

from autofit.core.knobs.lora_alpha import USUAL_ALPHA
from autofit.core.quoting import comment, lines_of
from autofit.export.fragments import Case, Fragments

# Kinds of models with transposed linear layers, a class of their own in transformers.
TRANSPOSED = ("clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt")
_TRANSPOSED_IMPORTS = (
    "from torch.nn import Linear",
    "from transformers.pytorch_utils import Conv1D",
)
_HEADS = 'heads = {n for n in linear if not n.startswith(f"{model.base_model_prefix}.")}'
_ATTENTION = 'targets = {name for name in linear if "attn" in name or "attention" in name}'
_NAMED = (
    'targets = {{n for n in {among} if any(f".{{name}}." in f".{{n}}." for name in {names!r})}}'
)
_ALL = 'target_modules="all-linear"'
_BUT_ATTENTION = 'exclude_modules=r"(?!.*att(n|ention)).*"'


def lora(case: Case) -> Fragments | None:
    """Adapters beside frozen weights; `precision` sets the dtypes of both."""
    config = case.config
    has_new_head = case.has_new_head
    rank, targets = config.lora_rank, config.lora_targets or "all-linear"
    names = (
        ()
        if targets in ("attention", "all-linear", "all-linear+head")
        else tuple(str(targets).split("+"))
    )
    if names and (case.has_experts or {"attention", "all-linear", "head"} & set(names)):
        return None
    if has_new_head and targets == "all-linear+head":
        targets = "all-linear"  # a classifier's new head is trained whole whatever the targets
    alpha, dropout = config.lora_alpha or USUAL_ALPHA, config.lora_dropout or 0.0
    # peft leaves out the output embedding by itself, but not every head of a classifier.
    by_name = has_new_head or targets == "all-linear+head" or bool(names)
    transposed = by_name and case.model_config["model_type"] in TRANSPOSED
    kinds = "(Linear, Conv1D)" if transposed else "torch.nn.Linear"
    linear = f"{{n for n, m in model.named_modules() if isinstance(m, {kinds})}}"
    lines = []
    if has_new_head:
        lines = [
            f"linear = {linear}",
            _HEADS,
            _ATTENTION if targets == "attention" else "targets = linear - heads",
        ]
    elif by_name:
        lines = [f"{'linear' if names else 'targets'} = {linear}"]
    if names:
        among = "linear - heads" if has_new_head else "linear"
        lines = [line for line in lines if not line.startswith("targets")] + [
            _NAMED.format(among=among, names=names)
        ]
    if targets == "attention" and not by_name:
        attach = [
            f"lora = LoraConfig({_ALL}, {_BUT_ATTENTION}, **LORA)",
            "model = get_peft_model(model, lora)",
        ]
    else:
        arguments = "target_modules=targets" if by_name else _ALL
        if has_new_head:
            arguments += ", modules_to_save=heads"
        attach = [f"model = get_peft_model(model, LoraConfig({arguments}, **LORA))"]
    kinds = "".join(
        f', "use_{kind}": True' for kind in ("dora", "rslora") if config.get(f"lora_{kind}")
    )
    whole = "; the head is new, trained whole" if has_new_head else ""
    return Fragments(
        imports=(
            "from peft import LoraConfig, get_peft_model",
            *(_TRANSPOSED_IMPORTS if transposed else ()),
        ),
        constants=(
            f'LORA = {{"r": {rank}, "lora_alpha": {alpha}, "lora_dropout": {dropout}{kinds}}}',
        ),
        adapt=(
            *lines_of(comment([f"lora_rank: {rank}, lora_targets: {targets}{whole}"])),
            *lines,
            "torch.manual_seed(torch.initial_seed())  # for adapters, whatever was drawn before",
            *attach,
        ),
        save=()
        if case.layout.world > 1
        else (
            "if args.weights:",
            "    model.save_pretrained(args.output, save_embedding_layers=False)",
            "else:  # adapters say nothing without the random weights below them",
            "    model.merge_and_unload().save_pretrained(args.output)",
        ),
    )


def lora_plus(case: Case) -> Fragments | None:
    """Two groups of matrices; vectors beside them, or an optimizer for each weight, would need more."""
    others = case.has_new_head or case.config.lora_dora or case.config.optimizer_in_backward
    return (
        None if others or case.shards else Fragments(faster=f"{case.config.lora_plus}  # lora_plus")
    )
