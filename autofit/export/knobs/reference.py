"""reference: where the script has the answers of the model before training from."""

from autofit.export.fragments import Case, Fragments
from autofit.export.template import fill, template


def reference(case: Case) -> Fragments | None:
    """A function `before_training(model, batch)`, and what main makes for it."""
    value = case.config.reference
    if value == "adapter-off":
        return Fragments(functions=(template("before_adapter_off"),))

    if value == "resident":
        copied = (
            "reference = build_model(args.weights).eval().requires_grad_(False)",
            f"reference = reference.to({case.frozen_dtype})",
            "torch.manual_seed(args.seed)  # for the same random weights again",
        )
        return Fragments(functions=(template("before_resident"),), companions=copied)

    function = fill(template("before_precomputed"), {"micro": str(case.micro_batch_size)})
    found = ('data["reference"] = all_before_training(model, data)',)
    return Fragments(functions=(function,), asked_first=found)
