"""A found config in the words of transformers' Trainer: keywords of the objects it is given, as plain data.

Those are TrainingArguments, the loading of the model, peft's LoraConfig and BitsAndBytesConfig. What Trainer cannot be
told is said in a sentence each, never left out in silence. `hf_trainer` makes the objects, and names the layers that
adapters are put beside, which takes the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.knobs import is_off
from autofit.core.workload import CLASSIFICATION_TASKS, Hyperparameters
from autofit.export.deviation import Deviation

_HALF = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "adamw-fp8": "adamw_torch_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_EMBEDDINGS = "Trainer keeps the state of embeddings in 32 bits, which takes more memory than measured"
_OPTIMIZERS_INSTEAD = {
    "adamw-8bit": _EMBEDDINGS,
    "paged-adamw-8bit": _EMBEDDINGS,
    "adamw-4bit": "Trainer scales its state in blocks of 256, where it was measured with 128",
    "adamw-fp8": "Trainer has none; torchao's 8-bit AdamW takes its place, with as many bytes",
}
# Liger's own names, which it leaves out where a kind of model has no such part.
_LIGER_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")


@dataclass(frozen=True)
class TrainerKeywords:
    """Keywords of TrainingArguments, of from_pretrained, of LoraConfig and of BitsAndBytesConfig; dtypes by name.

    `trained_dtype` is what adapters, and heads trained whole, are held in; `departures` are what Trainer does otherwise
    than what was measured.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    trained_dtype: str = ""
    departures: tuple[Deviation, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The departures, a sentence each."""
        return tuple(map(str, self.departures))

    def joined(self, other: TrainerKeywords) -> TrainerKeywords:
        """Both together."""
        return TrainerKeywords(
            arguments={**self.arguments, **other.arguments},
            model={**self.model, **other.model},
            lora={**self.lora, **other.lora},
            quantization={**self.quantization, **other.quantization},
            trained_dtype=self.trained_dtype or other.trained_dtype,
            departures=self.departures + other.departures,
        )


@dataclass(frozen=True)
class TrainerCase:
    """The config with every knob in it, where it runs, what it trains, and whether flash-attn is installed."""

    config: Config
    device: str
    task: str | None = None  # None: not known
    effective_batch_size: int | None = None
    flash_attn: bool = False


def trainer_keywords(case: TrainerCase) -> TrainerKeywords:
    """What Trainer is to be told so that it runs the config as it was measured.

    Raises:
        InputError: batch sizes are lacking, or Trainer refuses a value outright.
    """
    together = _always(case)
    for name, value in case.config.items():
        if name in TRAINER_KNOBS:
            together = together.joined(TRAINER_KNOBS[name](case))
        elif not is_off(value):
            together = together.joined(_departs(case, name, "Trainer does not know this knob, and runs without it"))
    return together


def _departs(case: TrainerCase, knob: str, instead: str, *, may_not_fit: bool = False) -> TrainerKeywords:
    return TrainerKeywords(departures=(Deviation(knob, case.config[knob], instead, may_not_fit),))


def _always(case: TrainerCase) -> TrainerKeywords:
    """The device, and autofit's defaults of learning where Trainer has others (it clips at 1.0)."""
    learning = Hyperparameters()
    return TrainerKeywords(
        arguments={
            "learning_rate": learning.lr,
            "lr_scheduler_type": learning.schedule,
            "weight_decay": learning.weight_decay,
            "max_grad_norm": learning.max_grad_norm or 0.0,
            "remove_unused_columns": False,
            "use_cpu": case.device == "cpu",
        },
    )


def _micro_batch(case: TrainerCase) -> TrainerKeywords:
    micro, _ = batch_sizes(case)
    return TrainerKeywords(arguments={"per_device_train_batch_size": micro, "per_device_eval_batch_size": micro})


def _accumulation(case: TrainerCase) -> TrainerKeywords:
    _, steps = batch_sizes(case)
    told = TrainerKeywords(arguments={"gradient_accumulation_steps": steps})
    if case.task == "masked-lm" and steps > 1:
        alike = "Trainer weighs micro-batches alike for this task, autofit by their labels"
        return told.joined(_departs(case, "gradient_accumulation_steps", alike))
    return told


def batch_sizes(case: TrainerCase) -> tuple[int, int]:
    """The micro-batch and how many of them make a step.

    Raises:
        InputError: they are lacking, or do not make the effective batch.
    """
    sizes = []
    for name in ("micro_batch_size", "gradient_accumulation_steps"):
        size = case.config[name]
        if not isinstance(size, int) or size < 1:
            remedy = "Give micro_batch_size and gradient_accumulation_steps, as a search writes them."
            raise InputError(f"{name} must be a whole number here, not {size!r}.", remedy)
        sizes.append(size)
    micro, steps = sizes
    if case.effective_batch_size not in (None, micro * steps):
        message = f"micro_batch_size {micro} x gradient_accumulation_steps {steps} is not the effective batch"
        raise InputError(f"{message} of {case.effective_batch_size}.", "Search again, or correct the config.")
    return micro, steps


def _elsewhere(case: TrainerCase) -> TrainerKeywords:
    """For knobs that another knob's function takes care of."""
    return TrainerKeywords()


def _precision(case: TrainerCase) -> TrainerKeywords:
    value = str(case.config["precision"])
    if value in _HALF:
        if value == "fp16-mixed" and case.device == "cpu":
            raise InputError("Trainer runs fp16-mixed on a GPU only.", "Set precision to bf16-mixed or fp32.")
        dtype = _HALF[value] if case.config["lora_rank"] else "float32"
        name = value.removesuffix("-mixed")
        return TrainerKeywords(arguments={name: True}, model={"dtype": dtype}, trained_dtype="float32")
    if value in ("bf16", "fp8"):
        told = TrainerKeywords(model={"dtype": "bfloat16"}, trained_dtype="bfloat16")
        if value == "fp8":
            slower = "Trainer multiplies in bfloat16, which is slower than measured"
            told = told.joined(_departs(case, "precision", slower))
        if case.task == "image-classification":
            left = "Trainer leaves images in float32; give pixel_values in bfloat16"
            told = told.joined(_departs(case, "precision", left))
        return told
    # Said on a GPU, because compiling switches tf32 on where nothing is said.
    arguments = {} if case.device == "cpu" else {"tf32": value == "tf32"}
    return TrainerKeywords(arguments=arguments, model={"dtype": "float32"}, trained_dtype="float32")


def _checkpointing(case: TrainerCase) -> TrainerKeywords:
    knob = "activation_checkpointing"
    value = str(case.config[knob])
    if value.startswith("budget-"):
        setting = f"torch._functorch.config.activation_memory_budget = {value.removeprefix('budget-')}"
        why = f"Trainer has no argument for it and keeps more for the backward; set {setting} yourself"
        return _departs(case, knob, why, may_not_fit=True)
    if value not in ("full", "alternate", "selective"):
        return TrainerKeywords()
    together = TrainerKeywords()
    options: dict[str, Any] = {"use_reentrant": False}
    if value == "selective":
        less = (
            "Trainer cannot keep the outputs of products; it checkpoints blocks whole, with less memory and more time"
        )
        together = _departs(case, knob, f"{less} than measured")
    elif value == "alternate":
        options["every_n_layers"] = 2
        why = "Trainer begins with the first block, so of an odd number it checkpoints one more than was measured"
        together = _departs(case, knob, why)
    if case.config["activation_offload"] != "none":
        options["offload"] = True
    arguments = {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}
    return together.joined(TrainerKeywords(arguments=arguments))


def _offload(case: TrainerCase) -> TrainerKeywords:
    """Trainer knows it for the inputs of checkpointed blocks only, as an option of their checkpointing."""
    knob = "activation_offload"
    if case.config[knob] == "none":
        return TrainerKeywords()
    if case.config["activation_checkpointing"] in ("full", "alternate", "selective"):
        slower = "Trainer's copies run between the computations, not beside them, which is slower than measured"
        return _departs(case, knob, slower)
    more = "Trainer offloads the inputs of checkpointed blocks only, and needs more memory than measured"
    return _departs(case, knob, more, may_not_fit=True)


def _lora(case: TrainerCase) -> TrainerKeywords:
    rank = case.config["lora_rank"]
    if not rank:
        return TrainerKeywords()
    alpha, dropout = case.config["lora_alpha"], case.config["lora_dropout"]
    return TrainerKeywords(lora={"r": rank, "lora_alpha": alpha or 2 * int(rank), "lora_dropout": dropout or 0.0})


def _quantization(case: TrainerCase) -> TrainerKeywords:
    value = str(case.config["quantization"])
    if value == "none":
        return TrainerKeywords()
    # A new head with a bias would be quantized; the name of this argument is that of the first kind there was.
    heads = (
        {"llm_int8_skip_modules": ["score", "classifier", "pre_classifier"]}
        if case.task in CLASSIFICATION_TASKS
        else {}
    )
    if value == "int8":
        return TrainerKeywords(quantization={"load_in_8bit": True, **heads})
    precision = str(case.config["precision"])
    four_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": value == "nf4-dq",
        "bnb_4bit_compute_dtype": "bfloat16" if precision == "bf16" else _HALF.get(precision, "float32"),
    }
    return TrainerKeywords(quantization={**four_bits, **heads})


def _optimizer(case: TrainerCase) -> TrainerKeywords:
    value = str(case.config["optimizer"])
    if value not in OPTIMIZERS:
        return _departs(
            case, "optimizer", "Trainer is given none of your own here, and runs its AdamW", may_not_fit=True
        )
    told = TrainerKeywords(arguments={"optim": OPTIMIZERS[value]})
    instead = _OPTIMIZERS_INSTEAD.get(value)
    if value == "adamw-foreach" and case.device == "cpu":
        instead = "on a CPU Trainer's AdamW updates weight by weight, in more time"
    if instead is None or (instead is _EMBEDDINGS and case.config["lora_rank"]):  # frozen embeddings have no state
        return told
    return told.joined(_departs(case, "optimizer", instead, may_not_fit=instead is _EMBEDDINGS))


def _unknown_to_trainer(name: str, consequence: str) -> Callable[[TrainerCase], TrainerKeywords]:
    def knob(case: TrainerCase) -> TrainerKeywords:
        if is_off(case.config[name]):
            return TrainerKeywords()
        return _departs(case, name, f"{consequence}, and needs more memory than measured", may_not_fit=True)

    return knob


def _compile(case: TrainerCase) -> TrainerKeywords:
    value = str(case.config["compile"])
    if value == "none":
        return TrainerKeywords()
    how = "block by block, as measured, it does with ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 in the environment"
    told = TrainerKeywords(arguments={"torch_compile": True, "torch_compile_mode": value})
    return told.joined(_departs(case, "compile", f"Trainer compiles the model as one; {how}"))


def _attention(case: TrainerCase) -> TrainerKeywords:
    value = case.config["attention"]
    if value in (None, "sdpa"):  # what transformers takes by itself
        return TrainerKeywords()
    if value == "eager":
        return TrainerKeywords(model={"attn_implementation": "eager"})
    if case.flash_attn:
        return TrainerKeywords(model={"attn_implementation": "flash_attention_2"})
    why = "without flash-attn, PyTorch takes its own flash kernel where it can, and another elsewhere"
    told = TrainerKeywords(model={"attn_implementation": "sdpa"})
    return told.joined(_departs(case, "attention", why, may_not_fit=True))


def _liger(case: TrainerCase) -> TrainerKeywords:
    """Kernels and the fused loss, which Trainer switches on together by the names Liger has for them."""
    kernels, fused = case.config["kernels"] == "liger", case.config["loss"] == "fused"
    if not (kernels or fused):
        return TrainerKeywords()
    others = {} if kernels else dict.fromkeys(_LIGER_KERNELS, False)
    options = {"cross_entropy": False, "fused_linear_cross_entropy": fused, **others}
    return TrainerKeywords(arguments={"use_liger_kernel": True, "liger_kernel_config": options})


def _loss(case: TrainerCase) -> TrainerKeywords:
    if case.config["loss"] != "chunked":  # `fused` is one of Liger's
        return TrainerKeywords()
    more = "Trainer holds the logits of all tokens, and needs more memory than measured"
    return _departs(case, "loss", more, may_not_fit=True)


# A new technique adds its row here; without one, `trainer_keywords` says that Trainer runs without it.
TRAINER_KNOBS: dict[str, Callable[[TrainerCase], TrainerKeywords]] = {
    "precision": _precision,
    "micro_batch_size": _micro_batch,
    "gradient_accumulation_steps": _accumulation,
    "activation_checkpointing": _checkpointing,
    "activation_offload": _offload,
    "lora_rank": _lora,
    "lora_targets": _elsewhere,
    "lora_alpha": _elsewhere,
    "lora_dropout": _elsewhere,
    "quantization": _quantization,
    "optimizer": _optimizer,
    "optimizer_offload": _unknown_to_trainer("optimizer_offload", "Trainer keeps the optimizer's state on the device"),
    "optimizer_in_backward": _unknown_to_trainer(
        "optimizer_in_backward", "Trainer holds all gradients until the update"
    ),
    "parameter_offload": _unknown_to_trainer("parameter_offload", "Trainer keeps frozen weights on the device"),
    "compile": _compile,
    "attention": _attention,
    "loss": _loss,
    "kernels": _liger,
}
