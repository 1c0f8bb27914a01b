"""precision, quantization and head_only: how weights are held and multiplied, and which are
trained."""

from autofit.core.quoting import lines_of
from autofit.export.fragments import Case, Fragments
from autofit.export.template import fill, template

_STATISTICS = (
    "for module in model.modules():",
    "    if isinstance(module, torch.nn.BatchNorm2d):",
    "        module.to(module.weight.dtype)  # the running statistics too",
)
_COMPUTE = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_FILL_UP = (
    "for layer in model.modules():",
    "    if isinstance(layer, Float8Linear):",
    "        layer.forward = partial(in_sixteens, layer.forward)",
)


def precision(case: Case) -> Fragments | None:
    """Weights, arithmetic and loss scaler; frozen weights are those that LoRA leaves untrained."""
    value = case.config.precision
    if value in ("fp32", "tf32"):
        return _in_float32(case)
    if value == "bf16":
        return _in_bfloat16(case)
    if value == "fp8":
        return _in_bfloat16(case).joined(_products_in_fp8(case))
    if value in ("bf16-mixed", "fp16-mixed"):
        return _under_autocast(case)

    return None


def _in_float32(case: Case) -> Fragments:
    """PyTorch rounds convolutions to TF32 by default, and matrix products only on request."""
    value = case.config.precision
    start: tuple[str, ...] = ()
    if value == "tf32":
        start = ('torch.set_float32_matmul_precision("high")  # precision: tf32',)
    elif case.device == "cuda" and case.task.medium == "images":
        switch = "torch.backends.cudnn.allow_tf32 = False"
        start = (f"{switch}  # precision: fp32, in convolutions too",)

    return Fragments(
        load_dtype="torch.float32",
        start=start,
        held=f"all weights in float32 (precision: {value})",
    )


def _in_bfloat16(case: Case) -> Fragments:
    return Fragments(
        load_dtype="torch.bfloat16",
        input_dtype="bfloat16",
        place=_cast(case, "torch.bfloat16"),
        held=f"all weights in bfloat16 (precision: {case.config.precision})",
    )


def _under_autocast(case: Case) -> Fragments:
    """Trained weights in float32, frozen ones in the dtype of the products."""
    value = case.config.precision
    low = _COMPUTE[value]
    arguments = f"DEVICE, dtype=torch.{low}"
    if case.config.activation_checkpointing != "none":
        arguments += ", cache_enabled=False"
    scaler = None
    if value == "fp16-mixed":
        scaler = "torch.amp.GradScaler(DEVICE)  # precision: fp16-mixed"

    load_dtype = "torch.float32"
    held = "all weights in float32"
    input_dtype = None
    place: tuple[str, ...] = ()
    if case.frozen:
        load_dtype = f"torch.{low}"
        held = f"frozen weights in {low}"
        # Autocast makes products of any input; a frozen norm before them needs it in the low dtype.
        input_dtype = low
        # Adapters beside quantized weights are made in float32; a new head is loaded as frozen
        # weights are.
        if case.has_new_head or case.config.quantization == "none":
            place = _cast(case, f"torch.float32 if parameter.requires_grad else torch.{low}")

    return Fragments(
        load_dtype=load_dtype,
        place=place,
        input_dtype=input_dtype,
        forward=(f"torch.autocast({arguments})  # precision: {value}",),
        scaler=scaler,
        held=held,
    )


def _cast(case: Case, dtype: str) -> tuple[str, ...]:
    """Cast every weight after loading: random ones are drawn in float32, so that a seed means the
    same in any dtype."""
    lines = []
    if " if " in dtype:
        lines += [f"dtype = {dtype}"]
        dtype = "dtype"

    place = "" if case.shards else "DEVICE, "
    lines += [f"parameter.data = parameter.data.to({place}{dtype})"]

    if case.config.quantization != "none":
        inner = [f"    {line}" for line in lines]
        lines = ["if parameter.is_floating_point():", *inner]

    loop = f"for parameter in model.parameters():  # precision: {case.config.precision}"
    cast = (loop, *(f"    {line}" for line in lines))
    if case.task.medium == "images":
        cast += _STATISTICS

    return cast


def _products_in_fp8(case: Case) -> Fragments:
    convert = "from torchao.float8 import convert_to_float8_training"
    if not case.has_new_head:
        slots = {"head": "model.get_output_embeddings()", "fill_up": ()}
        return Fragments(imports=(convert,), adapt=tuple(lines_of(fill(template("fp8"), slots))))

    # Texts padded to the longest one, and the 197 tokens of an image, are no multiple of 16; packed
    # text always is.
    head = 'getattr(model, "score", getattr(model, "classifier", None))'
    adapt = fill(template("fp8"), {"head": head, "fill_up": _FILL_UP})

    return Fragments(
        standard=("from functools import partial",),
        imports=(convert, "from torchao.float8.float8_linear import Float8Linear"),
        functions=(template("fp8_rows"),),
        adapt=tuple(lines_of(adapt)),
    )


def quantization(case: Case) -> Fragments | None:
    """Linear layers but the output head in 8 or 4 bits as they are loaded, by bitsandbytes."""
    value = case.config.quantization
    # which from_pretrained does not quantise
    if value not in ("int8", "nf4", "nf4-dq") or case.has_experts:
        return None

    standard = ["import tempfile"]
    start: tuple[str, ...] = ()
    if value == "int8":
        arguments = ["load_in_8bit=True"]
        standard += ["import logging"]
        quiet = 'logging.getLogger("bitsandbytes").setLevel(logging.ERROR)'
        start = (f"{quiet}  # it tells of a cast at every product",)
    else:
        compute = _COMPUTE.get(case.config.precision, "float32")
        arguments = [
            "load_in_4bit=True",
            'bnb_4bit_quant_type="nf4"',
            f"bnb_4bit_compute_dtype=torch.{compute}",
        ]

    if value == "nf4-dq":
        arguments += ["bnb_4bit_use_double_quant=True"]
    if case.has_new_head:
        # Without this, bitsandbytes quantizes a head that has a bias; despite its name it applies
        # to 4 bits as well.
        arguments += ['llm_int8_skip_modules=["score", "classifier", "pre_classifier"]']

    return Fragments(
        standard=tuple(standard),
        packages=("bitsandbytes", "accelerate"),
        quantization=tuple(arguments),
        quantized=f"{value} (quantization)",
        start=start,
    )


def head_only(case: Case) -> Fragments | None:
    """Linear layers outside the base model are trained; below a quantised body, or divided, they
    were not tried."""
    if case.shards or case.config.quantization != "none":
        return None

    outside = 'not name.startswith(f"{model.base_model_prefix}.")'
    lines = (
        "model.requires_grad_(False)  # head_only: true",
        "for name, module in model.named_modules():",
        f"    if isinstance(module, torch.nn.Linear) and {outside}:",
        "        module.requires_grad_(True)",
    )

    return Fragments(adapt=lines)
