"""optimizer, optimizer_offload, optimizer_in_backward: how, where and when gradients become
updates."""

from autofit.export.fragments import Case, Fragments
from autofit.export.knobs.blocks import BLOCK_CLASS
from autofit.export.template import template

_GIVEN = "{groups}, lr={lr}{decay}"
_OPTIMIZERS = {
    "adamw": (f"torch.optim.AdamW({_GIVEN}, fused=True)", ()),
    "adamw-foreach": (f"torch.optim.AdamW({_GIVEN}, foreach=True)", ()),
    "adamw-8bit": (f"AdamW8bit({_GIVEN})", ("from bitsandbytes.optim import AdamW8bit",)),
    "paged-adamw-8bit": (
        f"PagedAdamW8bit({_GIVEN})",
        ("from bitsandbytes.optim import PagedAdamW8bit",),
    ),
    "paged-adamw": (f"PagedAdamW({_GIVEN})", ("from bitsandbytes.optim import PagedAdamW",)),
    "lion-8bit": (f"Lion8bit({_GIVEN})", ("from bitsandbytes.optim import Lion8bit",)),
    "adamw-4bit": (f"AdamW4bit({_GIVEN})", ("from torchao.optim import AdamW4bit",)),
    "adamw-fp8": (f"AdamWFp8({_GIVEN})", ("from torchao.optim import AdamWFp8",)),
    "adamw-8bit-sr": (
        f"AdamW8bit({_GIVEN}, bf16_stochastic_round=True)",
        ("from torchao.optim import AdamW8bit",),
    ),
    "adamw-sr": (
        f"AdamWInFp32({_GIVEN}, bf16_stochastic_round=True)",
        ("from torchao.optim import _AdamW",),
    ),
    "adamw-master": (f"MasterAdamW({_GIVEN})", ()),
    "muon": ("MuonBesideAdamW({groups}, model, lr={lr}{decay})", (BLOCK_CLASS,)),
    # With these eps, lr means what it means to AdamW, and small gradients count in bf16 too.
    "adafactor": (f"torch.optim.Adafactor({_GIVEN}, eps=(1e-15, 1.0))", ()),
    "sgd": (f"torch.optim.SGD({_GIVEN})", ()),
}
_CLASSES = {
    "adamw-sr": "adamw_sr",
    "adamw-master": "adamw_master",
    "muon": "muon",
}  # in templates
# torchao's state of bf16 weights that are divided passes as fp32 (0.18), and its own step fails
# over that.
_OF_PLAIN_BF16 = ("adamw-4bit", "adamw-8bit-sr", "adamw-fp8")
# bitsandbytes' kernels know no weights that are divided.
_OF_WHOLES = ("adamw-8bit", "lion-8bit", "paged-adamw", "paged-adamw-8bit")
_PARTS = (
    "for parameter in trained:  # it steps this process's parts, in the same memory",
    "    parameter.part = torch.nn.Parameter(parameter.to_local())",
    '    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p.part, "grad", p.grad.to_local()))',
    "trained = [parameter.part for parameter in trained if parameter.part.numel()]",
)


def optimizer(case: Case) -> Fragments | None:
    """The optimizer's imports and the call that makes it."""
    value = case.config.optimizer
    if case.config.optimizer_offload != "none":
        return Fragments()  # it makes its own
    of_wholes = case.shards and value in _OF_WHOLES
    in_bf16 = case.shards and case.config.precision in ("bf16", "fp8")
    if value not in _OPTIMIZERS or (in_bf16 and value in _OF_PLAIN_BF16):
        return None
    if of_wholes and case.config.optimizer_in_backward:
        return None
    made, imports = _OPTIMIZERS[value]
    if of_wholes:
        return Fragments(
            imports=imports,
            optimizer=made,
            comment=f"optimizer: {value}",
            stepped_parts=_PARTS,
        )

    means = " (AdamW's lr)" if value == "adafactor" else ""
    functions = (template(_CLASSES[value]),) if value in _CLASSES else ()

    return Fragments(
        imports=imports,
        functions=functions,
        optimizer=made,
        comment=f"optimizer: {value}{means}",
    )


def optimizer_offload(case: Case) -> Fragments | None:
    """torchao's optimizer around a fused AdamW on the host, the only one that it accepts."""
    if case.config.optimizer_offload != "cpu" or case.config.optimizer != "adamw":
        return None
    return Fragments(
        imports=("from torch.optim import AdamW", "from torchao.optim import CPUOffloadOptimizer"),
        optimizer="CPUOffloadOptimizer({groups}, AdamW, lr={lr}{decay}, fused=True)",
        comment="optimizer_offload: cpu",
    )


def optimizer_in_backward(case: Case) -> Fragments | None:
    """Gradients are applied, and freed, as they come."""
    return (
        Fragments(stepped_in_backward=True) if case.config.optimizer_in_backward is True else None
    )
