"""loss: the cross-entropy of a causal language model that never holds the logits of all tokens."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments
from autofit.export.template import fill, import_from, template

# Kinds of models whose logits are those of a linear layer without a bias on what the base model returns, but for a
# soft-cap or a scale that the config names; the tests compare each with its own loss.
PLAIN_HEADS = frozenset(
    (
        *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral"),
        *("olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
    )
)
_ROWS = 256  # tokens that keep a GPU's matrix units busy
_LEAST_CHUNKS = 8


def loss(case: Case) -> Fragments | None:
    """A function that computes the loss from hidden states, some tokens at a time or by Liger's kernels."""
    value = case.config.get("loss", "standard")
    if value == "standard":
        return Fragments()
    if value not in ("chunked", "fused") or not _is_plain(case):
        return None
    return _chunked(case) if value == "chunked" else _fused(case)


def _is_plain(case: Case) -> bool:
    model = case.model_config
    known = model.get("model_type") in PLAIN_HEADS and not model.get("lm_head_bias")
    return case.task == "causal-lm" and known and bool(_features(case)) and bool(model.get("vocab_size"))


def _features(case: Case) -> int:
    return int(case.model_config.get("hidden_size") or case.model_config.get("n_embd") or 0)


def _scale(case: Case) -> str:
    """What follows the product with the head's weight: ` * 0.0625`, ` / 8.0` or nothing."""
    model = case.model_config
    if model.get("model_type") == "granite" and model.get("logits_scaling", 1.0) != 1.0:
        return f" / {float(model['logits_scaling'])}"
    if str(model.get("model_type")).startswith("cohere"):
        return f" * {float(model.get('logit_scale', 0.0625))}"
    return ""


def _cap(case: Case) -> float | None:
    cap = case.model_config.get("final_logit_softcapping")
    return float(cap) if cap and str(case.model_config.get("model_type")).startswith("gemma") else None


def _chunk_tokens(case: Case) -> int:
    """As many as make a chunk's logits as large as the hidden states of all tokens, not too few and not too many."""
    tokens = case.micro_batch_size * int(case.sequence_length or 1)
    rows = max(_ROWS, tokens * _features(case) // int(case.model_config["vocab_size"]))
    rows = -(-rows // 8) * 8  # matrix units like multiples of 8
    return max(1, min(rows, -(-tokens // _LEAST_CHUNKS)))


def _chunked(case: Case) -> Fragments:
    mixed = str(case.config.get("precision")).endswith("-mixed")
    cap, logits = _cap(case), f"logits{_scale(case)}"
    finished = f"{cap} * torch.tanh({logits} / {cap})" if cap else logits
    kind = "trained"
    if case.lora:
        kind = "any" if case.config.get("lora_targets") == "all-linear+head" else "frozen"
    slots = {
        "loss": _cross_entropy(finished),
        # Under autocast the products are in the low format, and their sum in that of the weight.
        "add": "for_weight += slope.t() @ hidden[part]" if mixed else "for_weight.addmm_(slope.t(), hidden[part])",
    }
    return Fragments(
        imports=(f"from torch.nn.functional import cross_entropy, {'' if case.lora else 'linear, '}pad",),
        constants=(f"CHUNK_TOKENS = {_chunk_tokens(case)}  # loss: chunked; whose logits exist at once",),
        functions=(fill(template(f"chunked_{kind}"), slots), _causal_loss(case, _TOTALS[kind])),
        loss="causal_loss",
    )


def _cross_entropy(finished: str) -> tuple[str, ...]:
    """The loss of a chunk, of what the model makes of its logits."""
    if finished == "logits":
        return ('loss = cross_entropy(logits.float(), labels[part], reduction="sum")',)
    scores = f"scores = ({finished}).float()"
    return (scores, 'loss = cross_entropy(scores, labels[part], reduction="sum")')


_TOTALS = {
    "trained": ("total = ChunkedLoss.apply(hidden.flatten(0, 1), labels, head.weight)",),
    "frozen": ("total = ChunkedLoss.apply(hidden.flatten(0, 1), labels, head)",),
    "any": (
        "trained = [each for each in head.parameters() if each.requires_grad]",
        "total = ChunkedLoss.apply(hidden.flatten(0, 1), labels, head, *trained)",
    ),
}


def _fused(case: Case) -> Fragments | None:
    if case.config.get("lora_targets") == "all-linear+head":
        return None
    cap, scale = _cap(case), _scale(case)
    total = (
        "total = liger_fused_linear_cross_entropy(",
        f"    hidden.flatten(0, 1){scale},",
        "    head.weight,",
        "    labels,",
        '    reduction="sum",',
        *((f"    softcap={cap},",) if cap else ()),
        ")",
    )
    return Fragments(
        imports=(
            import_from("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
            "from torch.nn.functional import pad",
        ),
        functions=(_causal_loss(case, total),),
        loss="causal_loss",
    )


def _causal_loss(case: Case, total: tuple[str, ...]) -> str:
    inner = "model = model.get_base_model()" if case.lora else ()
    return fill(template("causal_loss"), {"value": str(case.config["loss"]), "inner": inner, "total": total})
