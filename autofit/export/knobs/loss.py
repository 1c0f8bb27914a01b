"""loss: the cross-entropy of a causal language model that never holds the logits of all tokens."""

import math
from collections.abc import Sequence

from autofit.export.fragments import Case, Fragments
from autofit.export.template import call, fill, import_from, template

# Kinds of models whose logits are those of a linear layer without a bias on what the base model
# returns, but for a soft-cap or a scale that the config names. The tests compare each with its own
# loss.
PLAIN_HEADS = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
)
_ROWS = 256  # tokens that keep a GPU's matrix units busy
_LEAST_CHUNKS = 8


def loss(case: Case) -> Fragments | None:
    """A function that computes the loss from hidden states, some tokens at a time or by Liger's
    kernel."""
    model = case.model_config
    if model.get("model_type") not in PLAIN_HEADS or model.get("lm_head_bias"):
        return None
    if not case.task.defers_logits or not _features(case) or not model.get("vocab_size"):
        return None

    if case.config.loss == "chunked":
        return _chunked(case)
    if case.config.loss == "fused":
        return _fused(case)

    return None


def _features(case: Case) -> int:
    """The width of the hidden states; 0 where the config does not say."""
    model = case.model_config
    return int(model.get("hidden_size") or model.get("n_embd") or 0)


def _scale_and_cap(case: Case) -> tuple[str, float | None]:
    """What follows the product with the head's weight (` * 0.0625`, ` / 8.0` or nothing), and the
    soft-cap."""
    model = case.model_config
    kind = str(model["model_type"])
    scaling = model.get("logits_scaling", 1.0)
    if kind == "granite" and scaling != 1.0:
        return f" / {float(scaling)}", None

    if kind.startswith("cohere"):
        scale = float(model.get("logit_scale", 0.0625))
        return f" * {scale}", None

    cap = model.get("final_logit_softcapping")
    if cap and kind.startswith("gemma"):
        return "", float(cap)
    return "", None


def _chunked(case: Case) -> Fragments:
    """A loss that holds the logits of some tokens at a time."""
    # Within limits, as many tokens as make a chunk's logits as large as all hidden states.
    tokens = case.micro_batch_size * int(case.sequence_length or 1)
    vocabulary = int(case.model_config["vocab_size"])
    rows = max(_ROWS, tokens * _features(case) // vocabulary)
    rows = math.ceil(rows / 8) * 8  # matrix units like multiples of 8
    most = math.ceil(tokens / _LEAST_CHUNKS)
    chunk = max(1, min(rows, most))

    used = "cross_entropy, linear, pad"
    functions = _of_a_trained_weight
    if case.lora:
        used = "cross_entropy, pad"
        functions = _beside_adapters

    return Fragments(
        imports=(f"from torch.nn.functional import {used}",),
        constants=(f"CHUNK_TOKENS = {chunk}  # loss: chunked; whose logits exist at once",),
        functions=functions(case),
        loss="causal_loss",
    )


def _beside_adapters(case: Case) -> tuple[str, ...]:
    """By autograd through the head; a sum that has the chunks' gradients stands in for them.

    The sum copies its inputs in the backward: hidden states and adapters are small enough for it.
    """
    kind = "any" if case.adapts_head else "frozen"
    lines = _chunk_loss(case, "head(rows.requires_grad_())")
    total = fill(template(f"chunked_{kind}"), {"loss": lines})

    return (_causal_loss(case, total, stands_in=True),)


def _of_a_trained_weight(case: Case) -> tuple[str, ...]:
    """By hand in a Function, which hands over the large gradient of a weight without a copy."""
    # Under autocast the products are in the low dtype, and their sum in that of the weight.
    add = "for_weight.addmm_(slope.t(), rows)"
    if case.config.precision.endswith("-mixed"):
        add = "for_weight += slope.t() @ rows"
    total = "total = ChunkedLoss.apply(hidden, labels, model.get_output_embeddings().weight)"
    function = fill(template("chunked_trained"), {"loss": _chunk_loss(case), "add": add})

    return function, _causal_loss(case, total)


def _chunk_loss(case: Case, product: str | None = None) -> list[str]:
    """Lines from the head's `product`, or from `logits`, to the loss of a chunk."""
    scale, cap = _scale_and_cap(case)
    scores = f"logits{scale}"
    if cap:
        scores = f"{cap} * torch.tanh({scores} / {cap})"

    entropy = 'loss = cross_entropy({}.float(), targets, reduction="sum")'
    if scores == "logits":
        return [entropy.format(product or "logits")]

    lines = [f"scores = {scores}", entropy.format("scores")]
    if product:
        lines.insert(0, f"logits = {product}")
    return lines


def _fused(case: Case) -> Fragments | None:
    if case.adapts_head:
        return None

    scale, cap = _scale_and_cap(case)
    arguments = [
        f"hidden{scale}",
        "model.get_output_embeddings().weight",
        "labels",
        'reduction="sum"',
    ]
    if cap:
        arguments += [f"softcap={cap}"]
    function = "liger_fused_linear_cross_entropy"
    total = call(f"total = {function}", arguments, indent=4)

    return Fragments(
        imports=(
            import_from("liger_kernel.transformers.functional", function),
            "from torch.nn.functional import pad",
        ),
        functions=(_causal_loss(case, total),),
        loss="causal_loss",
    )


def _causal_loss(case: Case, total: str | Sequence[str], *, stands_in: bool = False) -> str:
    slots = {
        "value": case.config.loss,
        "inner": "model = model.get_base_model()" if case.lora else (),
        "positions": ', position_ids=batch["position_ids"]' if case.apart else "",
        "total": total,
        "sum": "(total + (stand_in - stand_in.detach()))" if stands_in else "total",
    }
    return fill(template("causal_loss"), slots)
