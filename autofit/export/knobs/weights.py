"""How weights are held and multiplied: precision and quantization."""

from __future__ import annotations

from autofit.export.fragments import Case, Fragments
from autofit.export.template import fill, template

_COMPUTE = {"bf16": "bfloat16", "bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def precision(case: Case) -> Fragments | None:
    """Weights, arithmetic and loss scaler by DESIGN section 4; frozen weights are what LoRA leaves untrained."""
    value = case.config.get("precision", "fp32")
    if value in ("fp32", "tf32"):
        start = ('torch.set_float32_matmul_precision("high")  # tf32',) if value == "tf32" else ()
        return Fragments(settings={"dtype": "torch.float32"}, start=start, held="all weights in float32")
    if value in ("bf16", "fp8"):
        dtype = "torch.bfloat16"
        both = Fragments(settings={"dtype": dtype}, input_dtype=dtype, held="all weights in bfloat16")
        return both.joined(_products_in_fp8(case)) if value == "fp8" else both
    if value not in ("bf16-mixed", "fp16-mixed"):
        return None
    half = _COMPUTE[str(value)]
    frozen = f"frozen weights in {half}, trained ones in float32"
    return Fragments(
        settings={"dtype": f"torch.{half}" if case.lora else "torch.float32"},
        forward=(f"torch.autocast(DEVICE, dtype=torch.{half})",),
        scaler="torch.amp.GradScaler(DEVICE)" if half == "float16" else None,
        held=frozen if case.lora else "all weights in float32",
    )


def _products_in_fp8(case: Case) -> Fragments:
    slots = {
        "head": () if case.classifies else "head = model.get_output_embeddings()",
        "no_head": 'name not in ("score", "classifier")' if case.classifies else "layer is not head",
    }
    return Fragments(
        imports=("from torchao.float8 import convert_to_float8_training",),
        functions=(fill(template("fp8"), slots),),
        adapt=("multiply_in_fp8(model)",),
    )


def quantization(case: Case) -> Fragments | None:
    """Linear layers but the output head in 8 or 4 bits as they are loaded, by bitsandbytes."""
    value = str(case.config.get("quantization", "none"))
    if value == "none":
        return Fragments()
    if value not in ("int8", "nf4", "nf4-dq"):
        return None
    compute = _COMPUTE.get(str(case.config.get("precision")), "float32")
    four_bits = (
        "load_in_4bit=True",
        'bnb_4bit_quant_type="nf4"',
        f"bnb_4bit_use_double_quant={value == 'nf4-dq'}",
        f"bnb_4bit_compute_dtype=torch.{compute}",
    )
    # A head with a bias would be quantized; the name of this argument is that of the first kind there was.
    heads = ('llm_int8_skip_modules=["score", "classifier"]',) if case.classifies else ()
    quiet = (
        "# It says at every product that inputs are cast to float16.",
        'logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)',
    )
    return Fragments(
        standard=("import tempfile", *(("import logging",) if value == "int8" else ())),
        packages=("bitsandbytes", "accelerate"),
        quantized_to="8-bit integers" if value == "int8" else "nf4",
        quantization=(*(("load_in_8bit=True",) if value == "int8" else four_bits), *heads),
        start=quiet if value == "int8" else (),
    )
