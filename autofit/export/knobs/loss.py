"""loss: the cross-entropy of a causal language model that never holds the logits of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from autofit.export.fragments import Case, Fragments
from autofit.export.template import call, fill, import_from, template

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
    return Fragments(
        imports=(f"from torch.nn.functional import cross_entropy, {'' if case.lora else 'linear, '}pad",),
        constants=(f"CHUNK_TOKENS = {_chunk_tokens(case)}  # loss: chunked; whose logits exist at once",),
        functions=_beside_adapters(case) if case.lora else _of_a_trained_weight(case),
        loss="causal_loss",
    )


def _beside_adapters(case: Case) -> tuple[str, ...]:
    """By autograd through the head; a sum whose gradients are those that the chunks gave stands in for them.

    That makes a copy of what it is given, in the backward: hidden states and adapters are small enough for it.
    """
    kind = "any" if case.config.get("lora_targets") == "all-linear+head" else "frozen"
    finished, logits = _finished(case), "head(rows.requires_grad_())"
    lines: tuple[str, ...] = (_cross_entropy(logits),)
    if finished != "logits":
        lines = (f"logits = {logits}", f"scores = {finished}", _cross_entropy("scores"))
    return (_causal_loss(case, fill(template(f"chunked_{kind}"), {"loss": lines}), _STANDS_IN),)


def _of_a_trained_weight(case: Case) -> tuple[str, ...]:
    """By hand, and in a Function, which hands over the large gradient of a weight without a copy."""
    finished, mixed = _finished(case), str(case.config.get("precision")).endswith("-mixed")
    lines: tuple[str, ...] = (_cross_entropy("logits"),)
    if finished != "logits":
        lines = (f"scores = {finished}", _cross_entropy("scores"))
    slots = {
        "loss": lines,
        # Under autocast the products are in the low format, and their sum in that of the weight.
        "add": "for_weight += slope.t() @ rows" if mixed else "for_weight.addmm_(slope.t(), rows)",
    }
    total = "total = ChunkedLoss.apply(hidden, labels, model.get_output_embeddings().weight)"
    return (fill(template("chunked_trained"), slots), _causal_loss(case, total))


def _finished(case: Case) -> str:
    """What the model makes of its logits."""
    cap, logits = _cap(case), f"logits{_scale(case)}"
    return f"{cap} * torch.tanh({logits} / {cap})" if cap else logits


def _cross_entropy(logits: str) -> str:
    return f'loss = cross_entropy({logits}.float(), targets, reduction="sum")'


_STANDS_IN = "(total + (stand_in - stand_in.detach()))"


def _fused(case: Case) -> Fragments | None:
    if case.config.get("lora_targets") == "all-linear+head":
        return None
    cap, scale = _cap(case), _scale(case)
    arguments = [f"hidden{scale}", "model.get_output_embeddings().weight", "labels", 'reduction="sum"']
    arguments += [f"softcap={cap}"] if cap else []
    total = call("total = liger_fused_linear_cross_entropy", arguments, indent=4)
    return Fragments(
        imports=(
            import_from("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
            "from torch.nn.functional import pad",
        ),
        functions=(_causal_loss(case, total),),
        loss="causal_loss",
    )


def _causal_loss(case: Case, total: str | Sequence[str], result: str = "total") -> str:
    inner = "model = model.get_base_model()" if case.lora else ()
    value = str(case.config["loss"])
    return fill(template("causal_loss"), {"value": value, "inner": inner, "total": total, "sum": result})
