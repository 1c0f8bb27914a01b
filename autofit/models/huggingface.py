"""Hugging Face models as workloads: the model factory, and the batch factory that fits it.

transformers and torch are imported where a config or a model is made, so that importing this file,
and with it the CLI, stays cheap.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from autofit.core.config_faults import config_fault
from autofit.core.errors import InputError, sentence
from autofit.core.task import MULTIMODAL, REFERENCE, Task
from autofit.core.tasks import TASKS
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.core.workload import Workload, reduction_of
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.heads import HEADS, read_two_words, score_texts
from autofit.models.losses import LOSSES, with_options
from autofit.models.tasks import BATCHES, auto_class, forward_arguments, model_classes
from autofit.models.tasks.several_texts import several_texts
from autofit.models.tasks.sizes import Asked, padding, positions
from autofit.models.tiled_mlp import TiledMlp
from autofit.models.trained_parts import train_parts

if TYPE_CHECKING:
    from torch import nn

EFFECTIVE_BATCH_SIZE = 32
# Not RuntimeError: running out of memory is one, and is no fault of the config.
_WRONG_CONFIG = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        TypeError,
        ValueError,
    ),
)


# Keys of a `source:` for what of a model is trained, how far gradients flow back, whether images
# stand in texts, how linear layers round, how many texts a sample has, which head the model is
# given, whether checkpointing spares what is frozen, how its MLPs are tiled, and which keys its
# config has besides.
PARTS = "parts"
ASKS_INPUTS = "asks_inputs"
SEES = "sees"
ROUNDS = "rounds"
TEXTS = "texts"
HEAD = "head"
SPARES = "spares_frozen"
TILES = "tiles"
OPTIONS = "options"


@dataclass(frozen=True)
class HuggingFaceModel:
    """() -> the model with random float32 weights: a task and a config.json, held as plain data
    that can be pickled.

    `source` says where the config came from; code that comes with a checkpoint is fetched from
    there, and only when `trust_remote_code` allows it.

    Attributes:
        parts: what is trained (`models.trained_parts`), where not all of it is.
        asks_inputs: whether gradients flow back to what the embeddings give, trained or not.
        rounds: how linear layers round, in a training for quantised inference.
        sees: whether images stand in the texts of a task that is of texts.
        texts: how many texts a sample has, of a task whose samples have one.
        head: what a tool gives a language model in place of its head, by `models.heads.HEADS`.
        spares_frozen: whether blocks of which nothing is trained are never checkpointed.
        tiles: how many tiles of a sequence its MLPs compute one after the other.
        options: further keys of its config, as num_labels.
    """

    name: str
    task: str
    config: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    parts: tuple[str, ...] = ()
    asks_inputs: bool = False
    sees: bool = False
    rounds: FakeQuantisation | None = None
    texts: int = 1
    head: str = ""
    spares_frozen: bool = False
    tiles: TiledMlp | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> "nn.Module":
        """Build the model on the current default device.

        Raises:
            InputError: the config describes no model that can be built.
        """
        import torch
        import transformers

        config = self.transformers_config()
        # of the checkpoint's weights, not of those made here
        vars(config).pop("quantization_config", None)
        auto = getattr(transformers, self.auto_class())
        try:
            # float32 whatever config.json says: what holds the weights is decided by the precision
            # that is searched.
            model: nn.Module = auto.from_config(
                config,
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
            )
        except _WRONG_CONFIG as error:
            message, remedy = config_fault(error) or (f"{sentence(error)}.", "")
            raise InputError(
                f"{self.name} cannot be built from its config: {message}", remedy
            ) from error

        task = TASKS[self.task]
        if task.reads_two_words:
            read_two_words(model)
        elif self.head:
            HEADS[self.head](model)
        elif self.sees and task.has_new_head:
            score_texts(model, config.num_labels)

        if self.rounds:
            self.rounds.apply(model)
        if self.tiles:
            self.tiles.apply(model)
        if self.parts:
            train_parts(model, self.parts)
        if self.spares_frozen:
            theirs: Any = model
            theirs.checkpoints_trained_alone = True

        if self.asks_inputs:
            asking: Any = model
            asking.enable_input_require_grads()

        return model

    @property
    def changed(self) -> dict[str, Any]:
        """What differs from a model of that config as it is, as plain data."""
        found: dict[str, Any] = {}
        if self.parts:
            found[PARTS] = list(self.parts)
        if self.asks_inputs:
            found[ASKS_INPUTS] = True
        if self.sees:
            found[SEES] = True
        if self.rounds:
            found[ROUNDS] = self.rounds.to_source()
        if self.texts > 1:
            found[TEXTS] = self.texts
        if self.head:
            found[HEAD] = self.head
        if self.spares_frozen:
            found[SPARES] = True
        if self.tiles:
            found[TILES] = self.tiles.to_source()
        if self.options:
            found[OPTIONS] = dict(self.options)

        return found

    def auto_class(self) -> str:
        """The name of the auto class of transformers that makes the model."""
        task = TASKS[self.task]
        if self.sees:
            task = IMAGE_TEXT_TO_TEXT
        elif self.head:
            task = CAUSAL_LM

        kind = str(self.config.get("model_type"))
        found = auto_class(task, kind, self.config.get("architectures") or ())
        return found or task.auto_class

    def arguments(self) -> tuple[str, ...]:
        """The names that the model's forward takes; none for code that comes with a checkpoint."""
        import transformers

        config = self.transformers_config()
        mapping = getattr(transformers, self.auto_class())._model_mapping
        if type(config) not in mapping:
            return ()

        classes = mapping[type(config)]
        if not isinstance(classes, tuple):
            classes = (classes,)

        names = self.config.get("architectures") or ()
        for model_class in classes:
            if model_class.__name__ in names:
                return forward_arguments(model_class)
        return forward_arguments(classes[0])

    def longest(self) -> int | None:
        """The most tokens that a sample can have; None where the config sets no limit."""
        return positions(self.transformers_config().get_text_config())

    def stretched(self, tokens: int) -> Self:
        """The same for samples of so many tokens, also where it was made for fewer and its
        positions are turned (RoPE), not learnt."""
        text = self.transformers_config().get_text_config()
        longest = positions(text)
        is_turned = getattr(text, "rope_parameters", None) is not None
        is_plain = "text_config" not in self.config
        if longest is None or tokens <= longest or not (is_turned and is_plain):
            return self
        options = {**self.options, "max_position_embeddings": tokens}

        return dataclasses.replace(self, options=options)

    def transformers_config(self) -> Any:
        """The config as transformers' own object, set for training."""
        from transformers import CONFIG_MAPPING, AutoConfig

        if self.trust_remote_code and "auto_map" in self.config:
            # From the cache: it was fetched when the model was resolved, and a probe must not wait
            # for a network.
            origin = self.source.get("path") or self.source["model"]
            config = AutoConfig.from_pretrained(
                origin,
                trust_remote_code=True,
                local_files_only=True,
            )
        else:
            # A copy, because transformers completes nested mappings in place.
            config = CONFIG_MAPPING[self.config["model_type"]].from_dict(
                copy.deepcopy({**self.config, **self.options})
            )

        task = TASKS[self.task]
        text = config.get_text_config()
        text.use_cache = False  # the keys and values that a generation would reuse
        if task.scores:
            config.num_labels = 1
        if self.sees and task.has_new_head:
            config.tie_word_embeddings = False  # the head is another one
        if task.pools_texts and padding(text) is None:
            # decoders find the last token of each sample by it, and refuse batches without
            text.pad_token_id = 0

        is_encoder_decoder = self.config["model_type"] == "vision-encoder-decoder"
        are_shifted = task.labels == "other tokens" or is_encoder_decoder
        if are_shifted and getattr(config, "decoder_start_token_id", None) is None:
            # before the labels, which are the decoder's input
            config.decoder_start_token_id = padding(config) or 0

        return config


def huggingface_workload(
    model: HuggingFaceModel,
    *,
    sequence_length: int | None = None,
    effective_batch_size: int | None = None,
    frozen: Mapping[str, Callable[[], Any]] | None = None,
    loss_options: Mapping[str, Any] | None = None,
) -> Workload:
    """The workload of training that model on random data of the largest shape.

    Args:
        frozen: the models that the loss of its task asks, but for copies of this one.
        loss_options: of that loss, such as {"beta": 0.2}.

    Raises:
        InputError: a sequence length the model cannot have, a config without what the data is made
            from, or a model that the task asks and that is not given.
    """
    task = TASKS[model.task]
    config = model.transformers_config()
    kind = str(model.config.get("model_type"))
    names = set(map(str, model.config.get("architectures") or ()))
    takes_more = any(not names.isdisjoint(model_classes(auto, kind)) for auto in MULTIMODAL)

    arguments: tuple[str, ...] = ()
    if takes_more or model.sees or not task.reads_text:
        arguments = model.arguments()
    asked = Asked(
        model.name,
        task,
        config,
        sequence_length,
        arguments,
        model.sees,
        model.texts,
    )

    unit = task.unit
    batches: Callable[[Asked], Any] = BATCHES[task.medium]
    is_of_answers = task.medium == "preferences"
    if task.of_texts and not is_of_answers and (model.sees or model.texts > 1):
        unit = "samples"
        batches = several_texts
    batch = batches(asked)

    loss = getattr(batch, "loss", None)
    if loss is None and task.name in LOSSES:
        loss = LOSSES[task.name]()
    if loss_options is not None:
        loss = with_options(loss, loss_options)

    source = dict(model.source)
    if loss_options:
        source["loss_options"] = dict(loss_options)
    if effective_batch_size is None:
        effective_batch_size = EFFECTIVE_BATCH_SIZE

    return Workload(
        model=model,
        batch=batch,
        loss=loss,
        frozen=_frozen_models(task, frozen or {}),
        precomputes=hasattr(loss, "precomputed"),
        effective_batch_size=effective_batch_size,
        unit=unit,
        sequence_length=getattr(batch, "sequence_length", None),
        task=model.task,
        name=model.name,
        reduction=reduction_of(task, config),
        count=getattr(batch, "count", None),
        source=source,
        notes=_notes(model, takes_more=takes_more),
    )


def _notes(model: HuggingFaceModel, *, takes_more: bool) -> tuple[str, ...]:
    """Sentences on what is trained otherwise than its name says.

    Args:
        takes_more: whether the model takes more than text.
    """
    notes = []
    if takes_more and TASKS[model.task].reads_text and not model.sees:
        note = f"{model.name} takes more than text, and is trained here on text alone"
        if auto_class(IMAGE_TEXT_TO_TEXT, str(model.config.get("model_type"))):
            note += f"; --task {IMAGE_TEXT_TO_TEXT.name} trains it on images, too"
        notes.append(f"{note}.")

    stored = model.config.get("quantization_config")
    if stored:
        method = stored["quant_method"]
        what = f"the checkpoint holds {method} weights, dequantised as they are loaded"
        notes.append(f"{what}: figures are of the dequantised.")

    if model.parts:
        notes.append(f"of {model.name} only {', '.join(model.parts)} is trained.")
    return tuple(notes)


def of_length(workload: Workload, sequence_length: int) -> Workload:
    """The workload of a named model with samples of another length, all else as it was."""
    model = workload.model
    assert isinstance(model, HuggingFaceModel), "the samples of others are the user's"
    given = {name: factory for name, factory in workload.frozen.items() if factory is not None}
    other = huggingface_workload(
        model,
        sequence_length=sequence_length,
        effective_batch_size=workload.effective_batch_size,
        frozen=given,
        loss_options=workload.source.get("loss_options"),
    )

    return dataclasses.replace(other, traits=workload.traits)


def _frozen_models(
    task: Task,
    given: Mapping[str, Callable[[], Any]],
) -> dict[str, Callable[[], Any] | None]:
    """The models that a task's loss asks, by name; None for a copy of the trained one.

    Raises:
        InputError: one is not given.
    """
    asked: dict[str, Callable[[], Any] | None] = {}
    for name in task.frozen:
        asked[name] = given.get(name)
        if asked[name] is None and name != REFERENCE:
            remedy = f"Give one: --{name} MODEL, or {name}= in Python."
            raise InputError(f"{task.name} asks a {name}, and none is given.", remedy)

    return asked
