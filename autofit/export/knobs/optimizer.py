"""What turns gradients into updates, and when and where: optimizer, optimizer_offload, optimizer_in_backward."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments

_OPTIMIZERS = {
    "adamw": ("torch.optim.AdamW({groups}, lr=lr{decay}, fused=True)", ()),
    "adamw-foreach": ("torch.optim.AdamW({groups}, lr=lr{decay}, foreach=True)", ()),
    "adamw-8bit": ("AdamW8bit({groups}, lr=lr{decay})", ("from bitsandbytes.optim import AdamW8bit",)),
    "paged-adamw-8bit": ("PagedAdamW8bit({groups}, lr=lr{decay})", ("from bitsandbytes.optim import PagedAdamW8bit",)),
    "adamw-4bit": ("AdamW4bit({groups}, lr=lr{decay})", ("from torchao.optim import AdamW4bit",)),
    "adamw-fp8": ("AdamWFp8({groups}, lr=lr{decay})", ("from torchao.optim import AdamWFp8",)),
    # With these eps, lr means what it means to AdamW, and small gradients count in bf16 too.
    "adafactor": ("torch.optim.Adafactor({groups}, lr=lr{decay}, eps=(1e-15, 1.0))", ()),
    "sgd": ("torch.optim.SGD({groups}, lr=lr{decay})", ()),
}
_ON_HOST = "CPUOffloadOptimizer({groups}, AdamW, lr=lr{decay}, fused=True)"


def optimizer(case: Case) -> Fragments | None:
    """The optimizer's imports and the call that makes it."""
    if case.config.get("optimizer_offload", "none") != "none":
        return Fragments()  # which makes its own
    found = _OPTIMIZERS.get(_value(case))
    if not found:
        return None
    means = ", lr as AdamW's" if _value(case) == "adafactor" else ""
    return Fragments(imports=found[1], optimizer=found[0], comment=f"optimizer: {_value(case)}{means}")


def _value(case: Case) -> str:
    return str(case.config.get("optimizer", "adamw"))


def optimizer_offload(case: Case) -> Fragments | None:
    """torchao's optimizer around a fused AdamW on the host, which is the only one that may be there."""
    value = case.config.get("optimizer_offload", "none")
    if value == "none":
        return Fragments()
    if value != "cpu" or case.config.get("optimizer", "adamw") != "adamw":
        return None
    return Fragments(
        imports=("from torch.optim import AdamW", "from torchao.optim import CPUOffloadOptimizer"),
        optimizer=_ON_HOST,
        comment="optimizer_offload: cpu",
    )


def optimizer_in_backward(case: Case) -> Fragments | None:
    """Gradients are applied, and freed, as they come."""
    value = case.config.get("optimizer_in_backward", False)
    return Fragments(stepped_in_backward=value) if isinstance(value, bool) else None
