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
    targets = config.lora_targets or "all-linear"
    names: tuple[str, ...] = ()
    if targets not in ("attention", "all-linear", "all-linear+head"):
        names = tuple(str(targets).split("+"))
        if case.has_experts or {"attention", "all-linear", "head"} & set(names):
            return None

    if has_new_head and targets == "all-linear+head":
        targets = "all-linear"  # a classifier's new head is trained whole whatever the targets

    # peft leaves out the output embedding by itself, but not every head of a classifier.
    by_name = has_new_head or targets == "all-linear+head" or bool(names)
    imports: tuple[str, ...] = ("from peft import LoraConfig, get_peft_model",)
    kinds = "torch.nn.Linear"
    if by_name and case.model_config["model_type"] in TRANSPOSED:
        imports += _TRANSPOSED_IMPORTS
        kinds = "(Linear, Conv1D)"

    linear = f"{{n for n, m in model.named_modules() if isinstance(m, {kinds})}}"

    among = "linear"
    arguments = "target_modules=targets"
    whole = ""
    lines = [f"linear = {linear}"]
    if has_new_head:
        among = "linear - heads"
        arguments += ", modules_to_save=heads"
        whole = "; the head is new, trained whole"
        lines += [_HEADS]

    attach = [f"model = get_peft_model(model, LoraConfig({arguments}, **LORA))"]

    if names:
        lines += [_NAMED.format(among=among, names=names)]
    elif has_new_head and targets == "attention":
        lines += [_ATTENTION]
    elif has_new_head:
        lines += ["targets = linear - heads"]
    elif by_name:
        lines = [f"targets = {linear}"]
    elif targets == "attention":
        lines = []
        attach = [
            f"lora = LoraConfig({_ALL}, {_BUT_ATTENTION}, **LORA)",
            "model = get_peft_model(model, lora)",
        ]
    else:
        lines = []
        attach = [f"model = get_peft_model(model, LoraConfig({_ALL}, **LORA))"]

    rank = config.lora_rank
    alpha = config.lora_alpha or USUAL_ALPHA
    dropout = config.lora_dropout or 0.0
    numbers = f'"r": {rank}, "lora_alpha": {alpha}, "lora_dropout": {dropout}'
    for kind in ("dora", "rslora"):
        if config.get(f"lora_{kind}"):
            numbers += f', "use_{kind}": True'

    save: tuple[str, ...] = ()
    if case.layout.world == 1:
        save = (
            "if args.weights:",
            "    model.save_pretrained(args.output, save_embedding_layers=False)",
            "else:  # adapters say nothing without the random weights below them",
            "    model.merge_and_unload().save_pretrained(args.output)",
        )

    return Fragments(
        imports=imports,
        constants=(f"LORA = {{{numbers}}}",),
        adapt=(
            *lines_of(comment([f"lora_rank: {rank}, lora_targets: {targets}{whole}"])),
            *lines,
            "torch.manual_seed(torch.initial_seed())  # for adapters, whatever was drawn before",
            *attach,
        ),
        save=save,
    )


def lora_plus(case: Case) -> Fragments | None:
    """Two groups of matrices; vectors beside them, or an optimizer for each weight, would need
    more."""
    others = case.has_new_head or case.config.lora_dora or case.config.optimizer_in_backward
    if others or case.shards:
        return None

    return Fragments(faster=f"{case.config.lora_plus}  # lora_plus")
