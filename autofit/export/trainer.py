"""A config in the words of transformers' Trainer: keywords of the objects that it is given, as
plain data.

Those are TrainingArguments, from_pretrained, peft's LoraConfig and BitsAndBytesConfig. What Trainer
cannot run as measured becomes a deviation. `api.training_arguments` makes the objects, and names
the layers that get adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.knobs import is_off
from autofit.core.knobs.activation_checkpointing import checkpoints_blocks
from autofit.core.knobs.lora_alpha import USUAL_ALPHA
from autofit.core.knobs.optimizer import KEEP_SMALL_UPDATES
from autofit.core.layout import Layout
from autofit.core.learning_rates import default_hyperparameters
from autofit.core.some_blocks import SomeBlocks
from autofit.core.task import Task
from autofit.core.tasks.custom import CUSTOM
from autofit.export.fragments import Parts
from autofit.export.source import Deviation, batch_sizes, cached_casts

_HALF = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "adamw-4bit": "adamw_torch_4bit",
    "adamw-fp8": "adamw_torch_8bit",
    "adamw-8bit-sr": "adamw_torch_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "lion-8bit": "lion_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_ROUNDS_SO = (
    "torchao's 8-bit AdamW, which rounds bf16 weights "
    "stochastically, takes its place, in less memory than measured"
)
OF_BF16 = {  # what many tools do; after the title
    "adamw-master": f"keeps no float32 copies of bf16 weights; {_ROUNDS_SO}",
    "adamw-sr": f"is given no class of your own; {_ROUNDS_SO}",
}
# Whose kernels know no weights that are divided.
_WHOLE_WEIGHTS = ("adamw_bnb_8bit", "lion_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
_EMBEDDINGS = (
    "Trainer keeps the state of embeddings in 32 bits, which takes more memory than measured"
)
_OPTIMIZERS_INSTEAD = {
    **dict.fromkeys(("adamw-8bit", "lion-8bit", "paged-adamw-8bit"), _EMBEDDINGS),
    **{value: f"Trainer {why}" for value, why in OF_BF16.items()},
    "adamw-4bit": "Trainer scales its state in blocks of 256, where it was measured with 128",
    "adamw-fp8": "Trainer has none; torchao's 8-bit AdamW takes its place, with as many bytes",
}
_CHECKPOINTING_INSTEAD = {
    "selective": "Trainer cannot keep the outputs of products; it checkpoints blocks whole, "
    "with less memory and more time than measured",
    "alternate": "Trainer begins with the first block, so of an odd number it checkpoints "
    "one more than was measured",
}
_ALL_DEVICES = (
    "gives weights up between forward and backward, with less memory and more time than measured"
)
# Liger's own names; it ignores those that a model has no part for.
_LIGER_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")


@dataclass(frozen=True)
class TrainerKeywords(Parts):
    """Keywords of TrainingArguments, from_pretrained, LoraConfig and BitsAndBytesConfig; dtypes by
    name.

    Attributes:
        trained_dtype: that of adapters, and of heads trained whole.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)
    trained_dtype: str = ""
    deviations: tuple[Deviation, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """The deviations, a sentence each."""
        return tuple(map(str, self.deviations))


@dataclass(frozen=True)
class TrainerCase:
    """The config with every knob in it, where it runs, what it trains, and whether flash-attn is
    installed."""

    config: Config
    device: str
    task: Task = CUSTOM
    effective_batch_size: int | None = None
    flash_attn: bool = False

    def keywords(
        self,
        knob: str,
        instead: str | None,
        *,
        may_not_fit: bool = False,
        **groups: Any,
    ) -> TrainerKeywords:
        """The keywords of a knob.

        Args:
            instead: how Trainer deviates from what was measured; None: it does not.
            may_not_fit: whether that may take more memory.
            groups: fields of TrainerKeywords.
        """
        if not instead:
            return TrainerKeywords(**groups)
        deviation = Deviation(knob, self.config[knob], instead, may_not_fit)

        return TrainerKeywords(**groups, deviations=(deviation,))


def trainer_keywords(case: TrainerCase) -> TrainerKeywords:
    """Everything that Trainer is given to run the config as it was measured.

    Raises:
        InputError: batch sizes are missing or contradict, or Trainer refuses a value.
    """
    always = {
        **learning(case.config),
        "remove_unused_columns": False,
        "use_cpu": case.device == "cpu",
    }
    together = TrainerKeywords(arguments=always)
    for name, value in case.config.items():
        if name in TRAINER_KNOBS:
            together = together.joined(TRAINER_KNOBS[name](case))
        elif not is_off(value):
            unknown = case.keywords(name, "Trainer does not know this knob, and runs without it")
            together = together.joined(unknown)

    return together.joined(TrainerKeywords(deviations=cached_casts("Trainer", case.config)))


def learning(config: Config, schedule: str = "lr_scheduler_type") -> dict[str, Any]:
    """autofit's defaults by Trainer's names; Trainer has others (it clips at 1.0)."""
    defaults = default_hyperparameters(config)
    return {
        "learning_rate": defaults.lr,
        schedule: defaults.schedule,
        "weight_decay": defaults.weight_decay,
        "max_grad_norm": defaults.max_grad_norm or 0.0,
    }


def _micro_batch(case: TrainerCase) -> TrainerKeywords:
    micro, _ = batch_sizes(case.config, case.effective_batch_size)
    return TrainerKeywords(
        arguments={"per_device_train_batch_size": micro, "per_device_eval_batch_size": micro}
    )


def _accumulation(case: TrainerCase) -> TrainerKeywords:
    knob = "gradient_accumulation_steps"
    _, steps = batch_sizes(case.config, case.effective_batch_size)
    instead = None
    if case.task.labels == "hidden tokens" and steps > 1:
        instead = "Trainer weighs micro-batches alike for this task, autofit by their labels"

    return case.keywords(knob, instead, arguments={knob: steps})


def _precision(case: TrainerCase) -> TrainerKeywords:
    value = case.config.precision
    if value in _HALF:
        return _mixed_precision(case)
    if value in ("bf16", "fp8"):
        return _in_bfloat16(case)

    arguments = {}
    if case.device != "cpu":
        # Written out, because compiling switches tf32 on by default.
        arguments = {"tf32": value == "tf32"}

    return TrainerKeywords(
        arguments=arguments,
        model={"dtype": "float32"},
        trained_dtype="float32",
    )


def _mixed_precision(case: TrainerCase) -> TrainerKeywords:
    """Trained weights in float32, frozen ones in the dtype of the products."""
    value = case.config.precision
    if value == "fp16-mixed" and case.device == "cpu":
        raise InputError(
            "Trainer runs fp16-mixed on a GPU only.", "Set precision to bf16-mixed or fp32."
        )

    dtype = _HALF[value] if case.config.lora_rank else "float32"

    return TrainerKeywords(
        arguments={value.removesuffix("-mixed"): True},
        model={"dtype": dtype},
        trained_dtype="float32",
    )


def _in_bfloat16(case: TrainerCase) -> TrainerKeywords:
    """All weights; fp8 has no other way in Trainer."""
    slower = None
    if case.config.precision == "fp8":
        slower = "Trainer multiplies in bfloat16, which is slower than measured"
    keywords = case.keywords(
        "precision",
        slower,
        model={"dtype": "bfloat16"},
        trained_dtype="bfloat16",
    )
    if case.task.medium != "images":
        return keywords

    images = "Trainer leaves images in float32; give pixel_values in bfloat16"
    return keywords.joined(case.keywords("precision", images))


def _checkpointing(case: TrainerCase) -> TrainerKeywords:
    knob = "activation_checkpointing"
    value = str(case.config[knob])
    if value.startswith("budget-"):
        budget = value.removeprefix("budget-")
        setting = f"torch._functorch.config.activation_memory_budget = {budget}"
        why = "Trainer has no argument for it and keeps more for the backward"

        return case.keywords(knob, f"{why}; set {setting} yourself", may_not_fit=True)

    if not checkpoints_blocks(value):
        return TrainerKeywords()

    options: dict[str, Any] = {"use_reentrant": False}
    if value == "alternate":
        options["every_n_layers"] = 2
    if case.config.activation_offload != "none":
        options["offload"] = True
    arguments = {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": options,
    }
    instead = _CHECKPOINTING_INSTEAD.get(value)
    if SomeBlocks.of(value):
        instead = (
            "Trainer cannot checkpoint the first blocks alone; it checkpoints all of them, "
            "with less memory and more time than measured"
        )

    return case.keywords(knob, instead, arguments=arguments)


def _offload(case: TrainerCase) -> TrainerKeywords:
    """Trainer offloads the inputs of checkpointed blocks only, as an option of their
    checkpointing."""
    knob = "activation_offload"
    if case.config[knob] == "none":
        return TrainerKeywords()

    if checkpoints_blocks(case.config.activation_checkpointing):
        beside = "Trainer's copies run between the computations, not beside them"
        return case.keywords(knob, f"{beside}, which is slower than measured")

    inputs = "Trainer offloads the inputs of checkpointed blocks only"

    return case.keywords(
        knob,
        f"{inputs}, and needs more memory than measured",
        may_not_fit=True,
    )


def _lora(case: TrainerCase) -> TrainerKeywords:
    config = case.config
    if not config.lora_rank:
        return TrainerKeywords()

    keywords = {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha or USUAL_ALPHA,
        "lora_dropout": config.lora_dropout or 0.0,
    }
    for kind in ("dora", "rslora"):
        if config.get(f"lora_{kind}"):
            keywords[f"use_{kind}"] = True

    return TrainerKeywords(lora=keywords)


def _plus(case: TrainerCase) -> TrainerKeywords:
    if not case.config.lora_plus:
        return TrainerKeywords()
    given = "peft.optimizers.create_loraplus_optimizer(...)"
    why = f"Trainer trains both matrices alike, unless you give it {given}"

    return case.keywords("lora_plus", why)


def _quantization(case: TrainerCase) -> TrainerKeywords:
    value = case.config.quantization
    precision = case.config.precision
    if value == "none":
        return TrainerKeywords()

    keywords: dict[str, Any] = {"load_in_8bit": True}
    if value != "int8":
        dtype = "bfloat16" if precision == "bf16" else _HALF.get(precision, "float32")
        keywords = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": value == "nf4-dq",
            "bnb_4bit_compute_dtype": dtype,
        }
        if case.config.data_parallel == "fsdp":
            keywords["bnb_4bit_quant_storage"] = dtype  # whole numbers are not divided

    if case.task.has_new_head:
        # bitsandbytes would quantize a new head that has a bias; despite its name this applies to 4
        # bits as well.
        keywords["llm_int8_skip_modules"] = ["score", "classifier", "pre_classifier"]

    return TrainerKeywords(quantization=keywords)


def _optimizer(case: TrainerCase) -> TrainerKeywords:
    value = str(case.config.optimizer)
    name = OPTIMIZERS.get("adamw-8bit-sr" if value in OF_BF16 else value)
    if case.config.data_parallel == "fsdp" and name in _WHOLE_WEIGHTS:
        why = "bitsandbytes steps no divided weights there; torchao's 8-bit AdamW takes its place"
        return case.keywords("optimizer", why, arguments={"optim": OPTIMIZERS["adamw-fp8"]})

    if name is None:
        given = "no Muon" if value == "muon" else "none of your own"
        own = f"Trainer is given {given} here, and runs its AdamW"
        return case.keywords("optimizer", own, may_not_fit=True)

    instead = _OPTIMIZERS_INSTEAD.get(value)
    if value == "adamw-foreach" and case.device == "cpu":
        instead = "on a CPU Trainer's AdamW updates weight by weight, in more time"
    if instead is _EMBEDDINGS and case.config.lora_rank:  # frozen embeddings have no state
        instead = None

    arguments: dict[str, Any] = {"optim": name}
    if value in KEEP_SMALL_UPDATES:
        arguments["optim_args"] = "bf16_stochastic_round=True"
    if value == "lion-8bit":
        arguments["adam_beta2"] = 0.99  # Lion's; Trainer would give it AdamW's

    return case.keywords(
        "optimizer",
        instead,
        may_not_fit=instead is _EMBEDDINGS,
        arguments=arguments,
    )


def _compile(case: TrainerCase) -> TrainerKeywords:
    value = case.config.compile
    if value == "none":
        return TrainerKeywords()

    variable = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1"
    how = f"block by block, as measured, it does with {variable} in the environment"
    arguments = {"torch_compile": True, "torch_compile_mode": value}
    why = f"Trainer compiles the model as one; {how}"

    return case.keywords("compile", why, arguments=arguments)


def _attention(case: TrainerCase) -> TrainerKeywords:
    value = case.config.attention
    if value in (None, "sdpa"):  # the default of transformers
        return TrainerKeywords()

    if value == "eager":
        return TrainerKeywords(model={"attn_implementation": "eager"})
    if case.flash_attn:
        return TrainerKeywords(model={"attn_implementation": "flash_attention_2"})

    without = "without flash-attn, PyTorch takes its own flash kernel where it can"
    why = f"{without}, and another elsewhere"
    return case.keywords(
        "attention",
        why,
        may_not_fit=True,
        model={"attn_implementation": "sdpa"},
    )


def _liger(case: TrainerCase) -> TrainerKeywords:
    """Kernels and the fused loss, which one argument of Trainer switches on together by Liger's own
    names."""
    has_kernels = case.config.kernels == "liger"
    has_loss = case.config.loss == "fused"
    if not (has_kernels or has_loss):
        return TrainerKeywords()

    options = {"cross_entropy": False, "fused_linear_cross_entropy": has_loss}
    if not has_kernels:
        options |= dict.fromkeys(_LIGER_KERNELS, False)
    return TrainerKeywords(
        arguments={
            "use_liger_kernel": True,
            "liger_kernel_config": options,
        }
    )


def _data_parallel(case: TrainerCase) -> TrainerKeywords:
    """How processes are started is the launcher's business; Trainer finds them."""
    value = case.config.data_parallel
    if value == "ddp":
        return TrainerKeywords(arguments={"ddp_find_unused_parameters": True})
    if value != "fsdp":
        return TrainerKeywords()

    why = None
    on_cpu = case.device == "cpu"
    if on_cpu:
        why = "Trainer divides no weights on a CPU, and needs more memory than measured"
    elif case.config.precision.endswith("-mixed"):
        why = "Trainer averages gradients in 16 bits, which were measured in float32"

    arguments = {"fsdp": True, "fsdp_config": _fsdp(case)}

    return case.keywords("data_parallel", why, may_not_fit=on_cpu, arguments=arguments)


def _fsdp(case: TrainerCase) -> dict[str, Any]:
    """One argument of Trainer, for all knobs of FSDP."""
    config = case.config
    options: dict[str, Any] = {}
    if config.data_parallel == "fsdp":
        options = {"version": 2, "cpu_ram_efficient_loading": config.quantization == "none"}
    reshard = config.get("reshard_after_forward")
    if reshard is not None:
        options["reshard_after_forward"] = reshard not in (False, "none")
    offload = config.get("fsdp_offload")
    if offload is not None:
        options["cpu_offload"] = offload not in (False, "none")

    return options


def _reshard(case: TrainerCase) -> TrainerKeywords:
    knob = "reshard_after_forward"
    value = case.config[knob]
    if value is None:
        return TrainerKeywords()

    instead = None
    if type(value) is int:  # a number of devices
        instead = f"Trainer {_ALL_DEVICES}"
    return case.keywords(knob, instead, arguments={"fsdp_config": _fsdp(case)})


def _replicate(case: TrainerCase) -> TrainerKeywords:
    layout = Layout.of(case.config)
    if layout.shard == 1 or layout.replicate == 1:
        return TrainerKeywords()

    sizes = f"dp_replicate_size={layout.replicate}, dp_shard_size={layout.shard}"
    given = f"parallelism_config=ParallelismConfig({sizes})"
    why = f"Trainer divides weights over all devices unless it is given {given}"
    return case.keywords("data_parallel_replicate", why)


def _split(knob: str, what: str, given: str) -> Callable[[TrainerCase], TrainerKeywords]:
    """A knob of devices that Trainer does not divide by itself."""

    def keywords(case: TrainerCase) -> TrainerKeywords:
        if case.config[knob] in (None, 1):
            return TrainerKeywords()
        return case.keywords(knob, f"Trainer splits no {what}, unless you give {given}")

    return keywords


def _impossible(knob: str, instead: str, *values: str) -> Callable[[TrainerCase], TrainerKeywords]:
    """A knob whose values, if none are named all but off, Trainer has nothing for."""

    def keywords(case: TrainerCase) -> TrainerKeywords:
        value = case.config[knob]
        is_possible = value not in values if values else is_off(value)
        if is_possible:
            return TrainerKeywords()
        why = f"{instead}, and needs more memory than measured"

        return case.keywords(knob, why, may_not_fit=True)

    return keywords


# A new technique adds its row here; without one, `trainer_keywords` reports that Trainer runs
# without it.
TRAINER_KNOBS: dict[str, Callable[[TrainerCase], TrainerKeywords]] = {
    "precision": _precision,
    "micro_batch_size": _micro_batch,
    "gradient_accumulation_steps": _accumulation,
    "activation_checkpointing": _checkpointing,
    "activation_offload": _offload,
    "lora_rank": _lora,
    **dict.fromkeys(  # see lora_rank
        ("lora_targets", "lora_alpha", "lora_dropout", "lora_dora", "lora_rslora"),
        lambda case: TrainerKeywords(),
    ),
    "lora_plus": _plus,
    "quantization": _quantization,
    "optimizer": _optimizer,
    "optimizer_offload": _impossible(
        "optimizer_offload", "Trainer keeps the optimizer's state on the device"
    ),
    "optimizer_in_backward": _impossible(
        "optimizer_in_backward", "Trainer holds all gradients until the update"
    ),
    "data_parallel": _data_parallel,
    "data_parallel_replicate": _replicate,
    "data_parallel_shard": lambda case: TrainerKeywords(),  # what is left
    "reshard_after_forward": _reshard,
    "tensor_parallel": _split(
        "tensor_parallel",
        "layers",
        "from_pretrained distributed_config=DistributedConfig(...)",
    ),
    "context_parallel": _split(
        "context_parallel",
        "samples",
        "it parallelism_config=ParallelismConfig(cp_size=...)",
    ),
    "fsdp_offload": lambda case: TrainerKeywords(
        arguments={} if case.config.fsdp_offload is None else {"fsdp_config": _fsdp(case)}
    ),
    "parameter_offload": _impossible("parameter_offload", "Trainer keeps weights on the device"),
    "compile": _compile,
    "attention": _attention,
    # `fused` is one of Liger's
    "loss": _impossible("loss", "Trainer holds the logits of all tokens", "chunked"),
    "kernels": _liger,
}
