"""optimizer, optimizer_offload, optimizer_in_backward: how, where and when gradients become updates."""

from autofit.export.fragments import Case, Fragments

_GIVEN = "{groups}, lr={lr}{decay}"
_OPTIMIZERS = {
    "adamw": (f"torch.optim.AdamW({_GIVEN}, fused=True)", ()),
    "adamw-foreach": (f"torch.optim.AdamW({_GIVEN}, foreach=True)", ()),
    "adamw-8bit": (f"AdamW8bit({_GIVEN})", ("from bitsandbytes.optim import AdamW8bit",)),
    "paged-adamw-8bit": (f"PagedAdamW8bit({_GIVEN})", ("from bitsandbytes.optim import PagedAdamW8bit",)),
    "adamw-4bit": (f"AdamW4bit({_GIVEN})", ("from torchao.optim import AdamW4bit",)),
    "adamw-fp8": (f"AdamWFp8({_GIVEN})", ("from torchao.optim import AdamWFp8",)),
    # With these eps, lr means what it means to AdamW, and small gradients count in bf16 too.
    "adafactor": (f"torch.optim.Adafactor({_GIVEN}, eps=(1e-15, 1.0))", ()),
    "sgd": (f"torch.optim.SGD({_GIVEN})", ()),
}
# bitsandbytes' kernels know no weights that are divided.
_PARTS = (
    "for parameter in trained:  # it steps this process's parts, in the same memory",
    "    parameter.part = torch.nn.Parameter(parameter.to_local())",
    '    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p.part, "grad", p.grad.to_local()))',
    "trained = [parameter.part for parameter in trained if parameter.part.numel()]",
)


def optimizer(case: Case) -> Fragments | None:
    """The optimizer's imports and the call that makes it."""
    value = case.text("optimizer", "adamw")
    if case.text("optimizer_offload") != "none":
        return Fragments()  # it makes its own
    of_wholes = case.shards and value in ("adamw-8bit", "paged-adamw-8bit")
    if value not in _OPTIMIZERS or (of_wholes and case.config.get("optimizer_in_backward")):
        return None
    made, imports = _OPTIMIZERS[value]
    if of_wholes:
        return Fragments(imports=imports, optimizer=made, comment=f"optimizer: {value}", stepped_parts=_PARTS)
    means = " (AdamW's lr)" if value == "adafactor" else ""
    return Fragments(imports=imports, optimizer=made, comment=f"optimizer: {value}{means}")


def optimizer_offload(case: Case) -> Fragments | None:
    """torchao's optimizer around a fused AdamW on the host, the only one that it accepts."""
    if case.text("optimizer_offload") != "cpu" or case.text("optimizer", "adamw") != "adamw":
        return None
    return Fragments(
        imports=("from torch.optim import AdamW", "from torchao.optim import CPUOffloadOptimizer"),
        optimizer="CPUOffloadOptimizer({groups}, AdamW, lr={lr}{decay}, fused=True)",
        comment="optimizer_offload: cpu",
    )


def optimizer_in_backward(case: Case) -> Fragments | None:
    """Gradients are applied, and freed, as they come."""
    return Fragments(stepped_in_backward=True) if case.config["optimizer_in_backward"] is True else None
