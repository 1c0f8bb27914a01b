"""A config in the words of transformers' Trainer: keywords of the objects that it is given, as plain data.

Those are TrainingArguments, from_pretrained, peft's LoraConfig and BitsAndBytesConfig. What Trainer cannot run as
measured becomes a deviation. `api.training_arguments` makes the objects, and names the layers that get adapters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.config import Config
from autofit.core.errors import InputError
from autofit.core.knobs import is_off
from autofit.core.knobs.lora_alpha import USUAL_ALPHA
from autofit.core.knobs.optimizer import KEEP_SMALL_UPDATES
from autofit.core.layout import Layout
from autofit.core.learning_rates import default_hyperparameters
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
_WHOLE = "Trainer cannot keep the outputs of products; it checkpoints blocks whole, with less memory and more time"
_CHECKPOINTING_INSTEAD = {
    "selective": f"{_WHOLE} than measured",
    "alternate": "Trainer begins with the first block, so of an odd number it checkpoints one more than was measured",
}
_ALL_DEVICES = (
    "gives weights up between forward and backward, with less memory and more time than measured"
)
# The values of activation_checkpointing that checkpoint blocks.
CHECKPOINTED = ("full", "alternate", "selective")
# Liger's own names; it ignores those that a model has no part for.
_LIGER_KERNELS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")


@dataclass(frozen=True)
class TrainerKeywords(Parts):
    """Keywords of TrainingArguments, from_pretrained, LoraConfig and BitsAndBytesConfig; dtypes by name.
    `trained_dtype` is that of adapters, and of heads trained whole."""

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
    """The config with every knob in it, where it runs, what it trains, and whether flash-attn is installed."""

    config: Config
    device: str
    task: Task = CUSTOM
    effective_batch_size: int | None = None
    flash_attn: bool = False

    def keywords(
        self, knob: str, instead: str | None, *, may_not_fit: bool = False, **groups: Any
    ) -> TrainerKeywords:
        """The keywords of a knob by group; with `instead`, they deviate from what was measured."""
        deviations = (Deviation(knob, self.config[knob], instead, may_not_fit),) if instead else ()
        return TrainerKeywords(**groups, deviations=deviations)


def trainer_keywords(case: TrainerCase) -> TrainerKeywords:
    """Everything that Trainer is given to run the config as it was measured. Raises InputError where batch sizes are
    missing or contradict, or Trainer refuses a value."""
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
            together = together.joined(
                case.keywords(name, "Trainer does not know this knob, and runs without it")
            )
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
    _, steps = batch_sizes(case.config, case.effective_batch_size)
    alike = "Trainer weighs micro-batches alike for this task, autofit by their labels"
    uneven = case.task.labels == "hidden tokens" and steps > 1
    name = "gradient_accumulation_steps"
    return case.keywords(name, alike if uneven else None, arguments={name: steps})


def _precision(case: TrainerCase) -> TrainerKeywords:
    value = case.config.precision
    if value in _HALF:
        if value == "fp16-mixed" and case.device == "cpu":
            raise InputError(
                "Trainer runs fp16-mixed on a GPU only.", "Set precision to bf16-mixed or fp32."
            )
        dtype = _HALF[value] if case.config.lora_rank else "float32"
        name = value.removesuffix("-mixed")
        return TrainerKeywords(
            arguments={name: True}, model={"dtype": dtype}, trained_dtype="float32"
        )
    if value in ("bf16", "fp8"):
        slower = (
            "Trainer multiplies in bfloat16, which is slower than measured"
            if value == "fp8"
            else None
        )
        keywords = case.keywords(
            "precision", slower, model={"dtype": "bfloat16"}, trained_dtype="bfloat16"
        )
        if case.task.medium == "images":
            images = "Trainer leaves images in float32; give pixel_values in bfloat16"
            keywords = keywords.joined(case.keywords("precision", images))
        return keywords
    # Written out on a GPU, because compiling switches tf32 on by default.
    arguments = {} if case.device == "cpu" else {"tf32": value == "tf32"}
    return TrainerKeywords(arguments=arguments, model={"dtype": "float32"}, trained_dtype="float32")


def _checkpointing(case: TrainerCase) -> TrainerKeywords:
    knob = "activation_checkpointing"
    value = str(case.config[knob])
    if value.startswith("budget-"):
        setting = (
            f"torch._functorch.config.activation_memory_budget = {value.removeprefix('budget-')}"
        )
        why = f"Trainer has no argument for it and keeps more for the backward; set {setting} yourself"
        return case.keywords(knob, why, may_not_fit=True)
    if value not in CHECKPOINTED:
        return TrainerKeywords()
    every_second = {"every_n_layers": 2} if value == "alternate" else {}
    offload = {"offload": True} if case.config.activation_offload != "none" else {}
    options = {"use_reentrant": False, **every_second, **offload}
    arguments = {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}
    return case.keywords(knob, _CHECKPOINTING_INSTEAD.get(value), arguments=arguments)


def _offload(case: TrainerCase) -> TrainerKeywords:
    """Trainer offloads the inputs of checkpointed blocks only, as an option of their checkpointing."""
    knob = "activation_offload"
    if case.config[knob] == "none":
        return TrainerKeywords()
    if case.config.activation_checkpointing in CHECKPOINTED:
        slower = "Trainer's copies run between the computations, not beside them, which is slower than measured"
        return case.keywords(knob, slower)
    more = "Trainer offloads the inputs of checkpointed blocks only, and needs more memory than measured"
    return case.keywords(knob, more, may_not_fit=True)


def _lora(case: TrainerCase) -> TrainerKeywords:
    rank = case.config.lora_rank
    if not rank:
        return TrainerKeywords()
    alpha, dropout = case.config.lora_alpha, case.config.lora_dropout
    kinds = {name: bool(case.config.get(f"lora_{name[4:]}")) for name in ("use_dora", "use_rslora")}
    numbers = {"r": rank, "lora_alpha": alpha or USUAL_ALPHA, "lora_dropout": dropout or 0.0}
    return TrainerKeywords(lora={**numbers, **{name: on for name, on in kinds.items() if on}})


def _plus(case: TrainerCase) -> TrainerKeywords:
    ratio = case.config.lora_plus
    why = "Trainer trains both matrices alike, unless you give it peft.optimizers.create_loraplus_optimizer(...)"
    return case.keywords("lora_plus", why if ratio else None)


def _quantization(case: TrainerCase) -> TrainerKeywords:
    value, precision = case.config.quantization, case.config.precision
    if value == "none":
        return TrainerKeywords()
    keywords: dict[str, Any] = {"load_in_8bit": True}
    if value != "int8":
        dtype = "bfloat16" if precision == "bf16" else _HALF.get(precision, "float32")
        keywords = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": value == "nf4-dq",
        }
        keywords["bnb_4bit_compute_dtype"] = dtype
        if case.config.data_parallel == "fsdp":
            keywords["bnb_4bit_quant_storage"] = dtype  # whole numbers are not divided
    if case.task.has_new_head:
        # bitsandbytes would quantize a new head that has a bias; despite its name this applies to 4 bits as well.
        keywords["llm_int8_skip_modules"] = ["score", "classifier", "pre_classifier"]
    return TrainerKeywords(quantization=keywords)


def _optimizer(case: TrainerCase) -> TrainerKeywords:
    value = str(case.config.optimizer)
    if case.config.data_parallel == "fsdp" and OPTIMIZERS.get(value) in _WHOLE_WEIGHTS:
        why = "bitsandbytes steps no divided weights there; torchao's 8-bit AdamW takes its place"
        return case.keywords("optimizer", why, arguments={"optim": OPTIMIZERS["adamw-fp8"]})
    name = OPTIMIZERS.get("adamw-8bit-sr" if value in OF_BF16 else value)
    if name is None:
        own = f"Trainer is given {'no Muon' if value == 'muon' else 'none of your own'} here, and runs its AdamW"
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
        "optimizer", instead, may_not_fit=instead is _EMBEDDINGS, arguments=arguments
    )


def _compile(case: TrainerCase) -> TrainerKeywords:
    value = case.config.compile
    if value == "none":
        return TrainerKeywords()
    how = "block by block, as measured, it does with ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 in the environment"
    arguments = {"torch_compile": True, "torch_compile_mode": value}
    return case.keywords(
        "compile", f"Trainer compiles the model as one; {how}", arguments=arguments
    )


def _attention(case: TrainerCase) -> TrainerKeywords:
    value = case.config.attention
    if value in (None, "sdpa"):  # the default of transformers
        return TrainerKeywords()
    if value == "eager":
        return TrainerKeywords(model={"attn_implementation": "eager"})
    if case.flash_attn:
        return TrainerKeywords(model={"attn_implementation": "flash_attention_2"})
    why = (
        "without flash-attn, PyTorch takes its own flash kernel where it can, and another elsewhere"
    )
    return case.keywords("attention", why, may_not_fit=True, model={"attn_implementation": "sdpa"})


def _liger(case: TrainerCase) -> TrainerKeywords:
    """Kernels and the fused loss, which one argument of Trainer switches on together by Liger's own names."""
    kernels, fused = case.config.kernels == "liger", case.config.loss == "fused"
    if not (kernels or fused):
        return TrainerKeywords()
    others = {} if kernels else dict.fromkeys(_LIGER_KERNELS, False)
    options = {"cross_entropy": False, "fused_linear_cross_entropy": fused, **others}
    return TrainerKeywords(arguments={"use_liger_kernel": True, "liger_kernel_config": options})


def _data_parallel(case: TrainerCase) -> TrainerKeywords:
    """How processes are started is the launcher's business; Trainer finds them."""
    value = case.config.data_parallel
    mixed, on_cpu = case.config.precision.endswith("-mixed"), case.device == "cpu"
    why = "Trainer averages gradients in 16 bits, which were measured in float32" if mixed else None
    if on_cpu:
        why = "Trainer divides no weights on a CPU, and needs more memory than measured"
    if value == "fsdp":
        arguments = {"fsdp": True, "fsdp_config": _fsdp(case)}
        return case.keywords("data_parallel", why, may_not_fit=on_cpu, arguments=arguments)
    return TrainerKeywords(arguments={"ddp_find_unused_parameters": True} if value == "ddp" else {})


def _fsdp(case: TrainerCase) -> dict[str, Any]:
    """One argument of Trainer, for all knobs of FSDP."""
    config, options = case.config, dict[str, Any]()
    if config.data_parallel == "fsdp":
        options = {"version": 2, "cpu_ram_efficient_loading": config.quantization == "none"}
    for knob, name in (
        ("reshard_after_forward", "reshard_after_forward"),
        ("fsdp_offload", "cpu_offload"),
    ):
        if config.get(knob) is not None:
            options[name] = config[knob] not in (False, "none")
    return options


def _reshard(case: TrainerCase) -> TrainerKeywords:
    knob = "reshard_after_forward"
    if case.config[knob] is None:
        return TrainerKeywords()
    some = type(case.config[knob]) is int
    return case.keywords(
        knob, f"Trainer {_ALL_DEVICES}" if some else None, arguments={"fsdp_config": _fsdp(case)}
    )


def _replicate(case: TrainerCase) -> TrainerKeywords:
    layout, knob = Layout.of(case.config), "data_parallel_replicate"
    sizes = f"dp_replicate_size={layout.replicate}, dp_shard_size={layout.shard}"
    why = f"Trainer divides weights over all devices unless it is given parallelism_config=ParallelismConfig({sizes})"
    return case.keywords(knob, why if layout.shard > 1 and layout.replicate > 1 else None)


def _split(knob: str, what: str, given: str) -> Callable[[TrainerCase], TrainerKeywords]:
    why = f"Trainer splits no {what}, unless you give {given}"
    return lambda case: case.keywords(knob, why if case.config[knob] not in (None, 1) else None)


def _impossible(knob: str, instead: str, *values: str) -> Callable[[TrainerCase], TrainerKeywords]:
    """A knob whose values, if none are named all but off, Trainer has nothing for."""

    def keywords(case: TrainerCase) -> TrainerKeywords:
        value = case.config[knob]
        if is_off(value) if not values else value not in values:
            return TrainerKeywords()
        return case.keywords(
            knob, f"{instead}, and needs more memory than measured", may_not_fit=True
        )

    return keywords


# A new technique adds its row here; without one, `trainer_keywords` reports that Trainer runs without it.
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
        "tensor_parallel", "layers", "from_pretrained distributed_config=DistributedConfig(...)"
    ),
    "context_parallel": _split(
        "context_parallel", "samples", "it parallelism_config=ParallelismConfig(cp_size=...)"
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
