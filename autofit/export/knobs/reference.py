"""The models that a loss asks beside the trained one: reference, teacher_precision."""

from autofit.core.task import TEACHER
from autofit.export.fragments import Case, Fragments
from autofit.export.template import call, fill, template


def reference(case: Case) -> Fragments | None:
    """A function `before_training(model, batch)`, and what main makes for it."""
    value = case.config.reference
    if value == "offloaded":  # as other weights that are streamed
        return None

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


def teacher(case: Case) -> Fragments:
    """A teacher from a directory of its own, whose linear layers may be quantised; else nothing."""
    if TEACHER not in case.task.frozen:
        return Fragments()

    arguments = ["args.teacher", f"dtype={case.frozen_dtype}", "device_map=DEVICE"]
    packages: tuple[str, ...] = ("accelerate",)
    stored = ["load_in_8bit=True"]
    if case.config.teacher_precision == "nf4":
        compute = f"bnb_4bit_compute_dtype={case.frozen_dtype}"
        stored = ["load_in_4bit=True", 'bnb_4bit_quant_type="nf4"', compute]

    lines: list[str] = []
    if case.config.teacher_precision in ("int8", "nf4"):
        packages += ("bitsandbytes",)
        lines = call("quantized = BitsAndBytesConfig", stored, indent=4)
        arguments.append("quantization_config=quantized")

    load = call(f"teacher = {case.task.auto_class}.from_pretrained", arguments, indent=4)
    return Fragments(
        packages=packages,
        companions=(*lines, *load, "teacher = teacher.eval().requires_grad_(False)"),
    )
