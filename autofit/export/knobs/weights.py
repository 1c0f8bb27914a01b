"""precision, quantization and head_only: how weights are held and multiplied, and which are trained."""

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
        # PyTorch rounds convolutions to TF32 by default, and matrix products only on request.
        start: tuple[str, ...] = ()
        if value == "tf32":
            start = ('torch.set_float32_matmul_precision("high")  # precision: tf32',)
        elif case.device == "cuda" and case.task.medium == "images":
            start = (
                "torch.backends.cudnn.allow_tf32 = False  # precision: fp32, in convolutions too",
            )
        return Fragments(
            load_dtype="torch.float32",
            start=start,
            held=f"all weights in float32 (precision: {value})",
        )
    if value in ("bf16", "fp8"):
        weights = Fragments(
            load_dtype="torch.bfloat16",
            input_dtype="bfloat16",
            place=_cast(case, "torch.bfloat16"),
            held=f"all weights in bfloat16 (precision: {value})",
        )
        return weights.joined(_products_in_fp8(case)) if value == "fp8" else weights
    if value not in ("bf16-mixed", "fp16-mixed"):
        return None
    half = f"torch.{_COMPUTE[value]}"
    uncached = "" if case.config.activation_checkpointing == "none" else ", cache_enabled=False"
    # Adapters beside quantized weights are made in float32; a new head is loaded as frozen weights are.
    cast = case.frozen and (case.has_new_head or case.config.quantization == "none")
    return Fragments(
        load_dtype=half if case.frozen else "torch.float32",
        place=_cast(case, f"torch.float32 if parameter.requires_grad else {half}") if cast else (),
        # Autocast makes products of any input; a frozen norm before them needs it in the low dtype.
        input_dtype=_COMPUTE[value] if case.frozen else None,
        forward=(f"torch.autocast(DEVICE, dtype={half}{uncached})  # precision: {value}",),
        scaler="torch.amp.GradScaler(DEVICE)  # precision: fp16-mixed"
        if value == "fp16-mixed"
        else None,
        held=f"frozen weights in {_COMPUTE[value]}" if case.frozen else "all weights in float32",
    )


def _cast(case: Case, dtype: str) -> tuple[str, ...]:
    """Cast every weight after loading: random ones are drawn in float32, so that a seed means the same in any dtype."""
    place = "" if case.shards else "DEVICE, "
    lines = [f"parameter.data = parameter.data.to({place}{dtype})"]
    if " if " in dtype:
        lines = [f"dtype = {dtype}", f"parameter.data = parameter.data.to({place}dtype)"]
    if case.config.quantization != "none":
        lines = ["if parameter.is_floating_point():", *(f"    {line}" for line in lines)]
    loop = f"for parameter in model.parameters():  # precision: {case.config.precision}"
    statistics = _STATISTICS if case.task.medium == "images" else ()
    return (loop, *(f"    {line}" for line in lines), *statistics)


def _products_in_fp8(case: Case) -> Fragments:
    heads = 'getattr(model, "score", getattr(model, "classifier", None))'
    head = heads if case.has_new_head else "model.get_output_embeddings()"
    adapt = fill(template("fp8"), {"head": head, "fill_up": _FILL_UP if case.has_new_head else ()})
    convert = "from torchao.float8 import convert_to_float8_training"
    if not case.has_new_head:
        return Fragments(imports=(convert,), adapt=tuple(lines_of(adapt)))
    # Texts padded to the longest one, and the 197 tokens of an image, are no multiple of 16; packed text always is.
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
    four_bits = (
        "load_in_4bit=True",
        'bnb_4bit_quant_type="nf4"',
        f"bnb_4bit_compute_dtype=torch.{_COMPUTE.get(case.config.precision, 'float32')}",
        *(("bnb_4bit_use_double_quant=True",) if value == "nf4-dq" else ()),
    )
    # Without this, bitsandbytes quantizes a head that has a bias; despite its name it applies to 4 bits as well.
    heads = (
        ('llm_int8_skip_modules=["score", "classifier", "pre_classifier"]',)
        if case.has_new_head
        else ()
    )
    quiet = 'logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of a cast at every product'
    return Fragments(
        standard=("import tempfile", *(("import logging",) if value == "int8" else ())),
        packages=("bitsandbytes", "accelerate"),
        quantization=(*(("load_in_8bit=True",) if value == "int8" else four_bits), *heads),
        quantized=f"{value} (quantization)",
        start=(quiet,) if value == "int8" else (),
    )


def head_only(case: Case) -> Fragments | None:
    """Linear layers outside the base model are trained; below a quantised body, or divided, they were not tried."""
    if case.shards or case.config.quantization != "none":
        return None
    lines = (
        "model.requires_grad_(False)  # head_only: true",
        "for name, module in model.named_modules():",
        '    if isinstance(module, torch.nn.Linear) and not name.startswith(f"{model.base_model_prefix}."):',
        "        module.requires_grad_(True)",
    )
    return Fragments(adapt=lines)
