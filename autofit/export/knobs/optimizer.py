"""What turns gradients into updates, and when and where: optimizer, optimizer_offload, optimizer_in_backward."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments

_OPTIMIZERS = {
    "adamw": ("Fused AdamW", "torch.optim.AdamW(groups, lr=lr, fused=True)", ()),
    "adamw-foreach": ("AdamW", "torch.optim.AdamW(groups, lr=lr, foreach=True)", ()),
    "adamw-8bit": (
        "AdamW with 8-bit state",
        "AdamW8bit(groups, lr=lr)",
        ("from bitsandbytes.optim import AdamW8bit",),
    ),
    "paged-adamw-8bit": (
        "Paged 8-bit AdamW",
        "PagedAdamW8bit(groups, lr=lr)",
        ("from bitsandbytes.optim import PagedAdamW8bit",),
    ),
    "adamw-4bit": ("AdamW with 4-bit state", "AdamW4bit(groups, lr=lr)", ("from torchao.optim import AdamW4bit",)),
    "adamw-fp8": ("AdamW with fp8 state", "AdamWFp8(groups, lr=lr)", ("from torchao.optim import AdamWFp8",)),
    # With these eps, lr means what it means to AdamW, and small gradients count in bf16 too.
    "adafactor": ("Adafactor, lr as AdamW's", "torch.optim.Adafactor(groups, lr=lr, eps=(1e-15, 1.0))", ()),
    "sgd": ("Plain SGD", "torch.optim.SGD(groups, lr=lr)", ()),
}
_ON_HOST = "CPUOffloadOptimizer(groups, torch.optim.AdamW, lr=lr, fused=True)"


def optimizer(case: Case) -> Fragments | None:
    """The optimizer's imports and the call that makes it."""
    if case.config.get("optimizer_offload", "none") != "none":
        return Fragments()  # which makes its own
    found = _OPTIMIZERS.get(str(case.config.get("optimizer", "adamw")))
    return Fragments(imports=found[2], optimizer=(found[0], found[1])) if found else None


def optimizer_offload(case: Case) -> Fragments | None:
    """torchao's optimizer around a fused AdamW on the host, which is the only one that may be there."""
    value = case.config.get("optimizer_offload", "none")
    if value == "none":
        return Fragments()
    if value != "cpu" or case.config.get("optimizer", "adamw") != "adamw":
        return None
    words = "AdamW on the host"
    return Fragments(imports=("from torchao.optim import CPUOffloadOptimizer",), optimizer=(words, _ON_HOST))


def optimizer_in_backward(case: Case) -> Fragments | None:
    """Gradients are applied, and freed, as they come."""
    value = case.config.get("optimizer_in_backward", False)
    return Fragments(stepped_in_backward=value) if isinstance(value, bool) else None
