"""`autofit.training_arguments`: what transformers' Trainer needs to run a config, for users with a
Trainer loop.

`export.trainer` translates a config into Trainer's keywords; here they become objects, and the
model is prepared. Data, logging and checkpoints stay with the user and Trainer."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainingArguments

from autofit.core.config import Config
from autofit.core.errors import InputError, as_input_error, require, sentence, unknown
from autofit.core.files import expanded
from autofit.core.layout import Layout
from autofit.core.result import Result, SavedResult, result_of
from autofit.core.tasks import task_named, task_of
from autofit.core.tasks.custom import CUSTOM
from autofit.export.trainer import TrainerCase, TrainerKeywords, trainer_keywords
from autofit.hardware.device import detect
from autofit.models import workload_from_source
from autofit.report.explain import nothing_fits
from autofit.setup import requirements
from autofit.setup.experts import expert_weights
from autofit.setup.layers import output_heads
from autofit.setup.state import modes_of, set_modes
from autofit.techniques import all_techniques, check
from autofit.techniques.lora_rank import adapter_targets
from autofit.training.meta_model import meta_model_from

_ARGUMENTS = {
    field.name: field.default for field in dataclasses.fields(TrainingArguments) if field.init
}
# How to learn is the user's business, and no deviation from what was measured.
_LEARNING = (
    "learning_rate",
    "lr_scheduler_type",
    "weight_decay",
    "max_grad_norm",
    "remove_unused_columns",
)


@dataclass(frozen=True)
class TrainerSetup:
    """Makes Trainer run a config: `Trainer(setup.prepare(model), setup.arguments,
    train_dataset=...)`.

    Attributes:
        arguments: for Trainer.
        peft_config: the adapters that `prepare` puts into the model, a peft.LoraConfig; None: none.
        model_kwargs: for `from_pretrained`, with the quantisation of frozen weights.
        trained_dtype: that of the adapters.
        notes: what Trainer runs otherwise than it was measured, a sentence each.
    """

    arguments: TrainingArguments
    peft_config: Any
    model_kwargs: dict[str, Any]
    trained_dtype: torch.dtype
    notes: tuple[str, ...]

    @property
    def quantization_config(self) -> BitsAndBytesConfig | None:
        """The quantisation of frozen weights as the model is loaded."""
        return self.model_kwargs.get("quantization_config")

    def prepare(self, model: PreTrainedModel) -> Any:
        """Put the model into its dtypes, with its attention and its adapters, in place.

        Returns:
            What Trainer takes.

        Raises:
            InputError: not a model of transformers, or weights that should be quantised and are
            not.
        """
        _refuse_others(model)
        if self.quantization_config is None:
            _cast(model.parameters(), self.model_kwargs["dtype"])
        elif not getattr(model, "is_quantized", False):
            message = "this config quantises frozen weights, and those of the model are not."
            remedy = "Load it with from_pretrained(weights, **setup.model_kwargs)."
            raise InputError(message, remedy)
        if "attn_implementation" in self.model_kwargs:
            model.set_attn_implementation(self.model_kwargs["attn_implementation"])
        _agree_on_the_loss(model)
        if self.peft_config is None:
            return model

        adapted = _adapted(model, self.peft_config)
        trained = (weight for weight in adapted.parameters() if weight.requires_grad)
        _cast(trained, self.trained_dtype)
        return adapted


def training_arguments(
    result: Result | SavedResult | str | Path | Mapping[str, Any],
    *,
    output_dir: str | Path,
    model: PreTrainedModel | None = None,
    **overrides: Any,
) -> TrainerSetup:
    """Set up `transformers.Trainer` to run a config.

    Batches reach the model with all their fields, as in `fit`. Learning rate, schedule, weight
    decay and clipping are those of `fit` (constant, none, none) until overridden; what else a
    config does not decide is Trainer's default.

    Args:
        result: a search's result, the path of a result.yaml, or a config with its batch sizes.
        model: names the layers for adapters; needed with lora_rank where the result cannot make the
            model again.
        overrides: TrainingArguments of your own, which go before those of the config.

    Raises:
        InputError: nothing fitted, a model that is not of transformers, an unknown argument, or one
        it refuses.
    """
    folder = expanded(output_dir, "output_dir")
    device = None
    workload: Mapping[str, Any] = {}
    source: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        given = Config(result)
    else:
        result = result_of(result)
        if result.config is None:
            raise nothing_fits(result)
        given = Config(result.config)
        workload = result.workload
        source = result.source
        facts = result.hardware
        device = facts.get("device") if isinstance(facts, Mapping) else facts.device
    if overrides.get("use_cpu"):
        device = "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        message = "this config is for a GPU, and there is no CUDA device here."
        raise InputError(message, "Run it where the card is.")

    hardware = detect(device)
    check(given, hardware)
    off = Config({technique.name: technique.off for technique in all_techniques()})
    config = off.replace(**given)
    structure: Any = model
    if model is None:
        structure = _structure(source, workload, config)
    if structure is not None:
        _refuse_others(structure)

    task = task_of(structure)
    if task is CUSTOM:
        task = task_named(workload.get("task"))
    batch_size = workload.get("effective_batch_size")
    has_flash = requirements.installed("flash_attn")
    case = TrainerCase(config, hardware.device, task, batch_size, flash_attn=has_flash)
    keywords = trainer_keywords(case)
    decided = _renamed(keywords.arguments)
    own = _renamed(overrides)
    for name, value in own.items():
        if name not in _ARGUMENTS:
            raise unknown("training argument", name, _ARGUMENTS)
        is_number = type(_ARGUMENTS[name]) in (int, float)
        fine = not is_number or isinstance(value, int | float)
        require(fine, f"{name} must be a number", value)

    def refusal(error: BaseException) -> str:
        return f"transformers refuses these training arguments: {sentence(error)}."

    with as_input_error(refusal):
        arguments = TrainingArguments(**{"output_dir": str(folder), **decided, **own})

    notes = list(keywords.notes)
    for name, value in own.items():
        if name in decided and name not in _LEARNING and value != decided[name]:
            notes.append(f"{name}: you set {value!r}, where the config says {decided[name]!r}.")

    ranks = max(1, arguments.n_gpu) * arguments.world_size
    wanted = Layout.of(config).world
    if ranks != wanted > 1:
        here = f"this config is for {wanted} devices, and Trainer finds {ranks} here"
        notes.append(f"{here}; start your script with torchrun --nproc-per-node {wanted}.")
    elif ranks > wanted:
        more = f"so the effective batch is {ranks} times the measured one"
        remedy = "choose one card with CUDA_VISIBLE_DEVICES=0."
        notes.append(f"Trainer takes {ranks} devices, {more}; {remedy}")

    model_kwargs = dict(keywords.model)
    model_kwargs["dtype"] = getattr(torch, model_kwargs["dtype"])
    if keywords.quantization:
        model_kwargs["quantization_config"] = BitsAndBytesConfig(**keywords.quantization)
        if structure is not None and any(expert_weights(structure)):
            notes.append("from_pretrained leaves the experts unquantised, which may no longer fit.")

    adapters = None
    if config.lora_rank:
        adapters = _lora_config(keywords, structure, config)
    trained_dtype = getattr(torch, keywords.trained_dtype)
    return TrainerSetup(arguments, adapters, model_kwargs, trained_dtype, tuple(notes))


def _structure(source: Mapping[str, Any], workload: Mapping[str, Any], config: Config) -> Any:
    """The model without weights, whose layers adapters need; None: without adapters, or not known."""
    # A function is never called because a file names it.
    if not source or not config.lora_rank or source.get("kind") == "function":
        return None
    return meta_model_from(workload_from_source(source, workload).model)


def _refuse_others(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        kind = f"{type(model).__module__}.{type(model).__name__}"
        message = f"Trainer is set up for models of transformers, and this one is a {kind}."
        raise InputError(message, "Train others with autofit.fit(model, loader, config=...).")


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of the transformers installed, which renamed gradient to activation
    checkpointing."""
    before, after = "gradient_checkpointing", "activation_checkpointing"
    if after not in _ARGUMENTS:
        before, after = after, before
    return {name.replace(before, after): value for name, value in arguments.items()}


def _lora_config(keywords: TrainerKeywords, structure: Any, config: Config) -> Any:
    from peft import LoraConfig

    if structure is None:
        raise InputError(
            "adapters are put beside layers by name, and this result cannot make the model that has them.",
            "Give the model as model=.",
        )

    task = task_of(structure)
    heads: list[Any] = []
    if task.classifies:  # they are new: trained whole, whatever the targets
        heads = output_heads(structure)
    layers, experts = adapter_targets(structure, str(config.lora_targets or "all-linear"))
    saved = [name for name, module in structure.named_modules() if module in heads]
    return LoraConfig(
        **keywords.lora,
        target_modules=layers,
        target_parameters=experts or None,
        modules_to_save=saved or None,
        task_type=None if task.classifies else task.peft_type,
    )


def _adapted(model: PreTrainedModel, config: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # Of GPT-2's layers, which peft handles by itself.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        # peft still asks by a name that transformers has renamed.
        warnings.filterwarnings(
            "ignore",
            message="`is_gradient_checkpointing`",
            category=FutureWarning,
        )
        # It fails where the model has other layers than the config's.
        with as_input_error(lambda error: f"peft cannot adapt this model: {sentence(error)}."):
            return get_peft_model(model, config)


def _cast(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Parameters alone: buffers such as the frequencies of rotary embeddings keep their
    precision."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _agree_on_the_loss(model: PreTrainedModel) -> None:
    """Make Trainer weigh micro-batches as the model's loss needs it.

    Trainer passes the number of labels in the whole batch to every model whose forward takes any
    keyword, and trusts it to divide by that. Many do not: BERT's loss and gradients then come out
    as many times too large as there are micro-batches. And Trainer counts labels without the shift
    for causal models of unknown class names (GPT-2)."""
    if not task_of(model).predicts_next_token:
        model.accepts_loss_kwargs = False
    elif _divides_by_count(model):
        model.loss_type = "ForCausalLM"
    else:
        model.accepts_loss_kwargs = False
        message = "this model's loss ignores how many labels the whole batch has: Trainer weighs micro-batches alike."
        warnings.warn(message, stacklevel=3)


@torch.no_grad()
def _divides_by_count(model: Any) -> bool:
    """Whether the loss of a few tokens halves when the batch is said to hold twice as many labels.

    In training mode, with the same dropout twice: in evaluation bitsandbytes repacks NF4 weights on
    a CPU for good."""
    ids = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    devices = [ids.device] if ids.is_cuda else []

    def loss(**keywords: Any) -> float:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            return float(model(input_ids=ids, labels=ids, **keywords).loss)

    modes = modes_of(model)
    model.train()
    try:
        usual = loss()
        halved = loss(num_items_in_batch=torch.tensor(2 * 7))
    except TypeError:  # no such keyword, as Trainer finds out by itself
        return False
    finally:
        set_modes(modes)
    return abs(2 * halved - usual) <= 0.02 * abs(usual)
