"""Task: all that is particular to one thing that models are trained for, as plain data.

Every task is one file of `core.tasks`. What needs torch follows from these words: `models.tasks` makes batches by the
medium and the labels, `data` reads files by them, exporters write `script`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# The auto classes of models that take more than text.
MULTIMODAL = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")

IGNORED_LABEL = -100  # what torch's cross-entropy and transformers leave out of the mean

REFERENCE = "reference"  # the name of a copy of the model as it was before training

TEACHER = "teacher"  # of a model that another one learns from

Names = tuple[str, ...]
Medium = Literal[
    "own",
    "text",
    "pairs of texts",
    "preferences",
    "completions",
    "images",
    "videos",
    "sound",
    "images and text",
    "latents",
]
Labels = Literal[
    "own",
    "next tokens",
    "hidden tokens",
    "other tokens",
    "transcript",
    "class",
    "class of each token",
    "class of each pixel",
    "boxes",
    "span",
    "better answer",
    "better text",
    "good or bad",
    "relevance",
    "relevance in words",
    "rewarded tokens",
    "noise",
    "none",
]


@dataclass(frozen=True)
class Script:
    """A task's share of train.py: what reads its data, and lines of the script or parts of them."""

    templates: Names = ()  # that read the data; without any, no train.py is written
    loss: str = ""  # the function of (model, batch) that computes it; else the model does
    loss_templates: Names = ()  # that hold it
    loss_imports: Names = ()
    constants: Names = ()  # options of the loss
    replays: bool = False  # whether the loss is of all samples of a batch together
    before_step: Names = ()  # lines that find what the loss needs to know of the whole batch
    data_kind: str = ""  # what they read, in words
    slots: Mapping[str, str | Sequence[str]] = field(default_factory=dict)  # of those templates
    imports: Names = ()
    unit: str = "samples"
    valid: str = 'batch["labels"] != -100'  # which labels the loss is a mean of
    mask_argument: str = ""  # the further argument of what makes a batch, where that hides tokens
    batch: str = "yield {name: tensor[chosen] for name, tensor in data.items()}"
    forward_arguments: str = ""


@dataclass(frozen=True)
class Task:
    """What a model is trained for.

    Args:
        name: what users call it, and results.
        medium: what a sample is made of; "own": of whatever the user's own loss takes.
        labels: what the model learns to tell of a sample.
        frozen: the further models that its loss asks, which are not trained.
        auto_classes: those of transformers whose models are trained for it, the first before the next.
        class_endings: of the names of transformers' classes that are for this task alone.
        saved_as: further endings of the class that a checkpoint of such a model was saved from.
        rows: the fields of a row in files of data, in each form that is read; none: no files are read.
        packs: whether samples can be put one after the other.
        defers_logits: whether a loss that never holds all logits may take the place of the model's own.
        pixels: of an image's side, where the config of the model names none.
        peft_type: peft's name of it.
        script: its share of train.py.
        generated: whether its samples are what the model itself generates in the training, which is
            planned by `autofit estimate` and never searched.
        tools: the keys by which other tools are told of it, by the tool's name; of what every tool
            trains none.
        loss_keys: the keys of the options of its loss, by the tool's name and the option's: a key,
            or for each value that the tool knows its keys.
        stages: what a tool's command calls it; a dotted name is that of a class of the tool's, to
            which Config and Trainer are added, for what its command has none of.
        by_micro_batch: the tools that compute its loss of each micro-batch by itself, where samples of
            a batch change one another's: there the size of micro-batches decides what is learnt.
    """

    name: str
    medium: Medium
    labels: Labels
    frozen: Names = ()
    auto_classes: Names = ()
    class_endings: Names = ()
    saved_as: Names = ()
    rows: tuple[Names, ...] = ()
    packs: bool = False
    defers_logits: bool = False
    pixels: int = 224  # ImageNet's
    peft_type: str | None = None
    script: Script = Script()
    generated: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss_keys: Mapping[str, Mapping[str, str | Mapping[Any, Mapping[str, Any]]]] = field(
        default_factory=dict
    )
    stages: Mapping[str, str] = field(default_factory=dict)
    by_micro_batch: Names = ()

    @property
    def auto_class(self) -> str:
        """The usual one of its auto classes."""
        return self.auto_classes[0]

    @property
    def reads_text(self) -> bool:
        """Whether samples are of text alone."""
        return self.medium == "text"

    @property
    def of_texts(self) -> bool:
        """Whether samples are of texts alone, of one or of several each."""
        return self.medium in ("text", "pairs of texts", "preferences")

    @property
    def predicts_next_token(self) -> bool:
        """Whether the loss shifts the labels by one, so that the first of each sample is never predicted."""
        return self.labels == "next tokens"

    @property
    def continues_text(self) -> bool:
        """Whether it is that of causal language models on text alone, which most tools are made for."""
        return self.predicts_next_token and self.reads_text and not self.frozen

    @property
    def of_language_models(self) -> bool:
        """Whether it trains what continues texts, by whatever loss."""
        return self.peft_type == "CAUSAL_LM" or self.scores

    @property
    def classifies(self) -> bool:
        """Whether the model ends in a new head for classes, which is trained whole."""
        return self.labels in ("class", "class of each token")

    @property
    def scores(self) -> bool:
        """Whether the model ends in a new head for one number, which says how good a text is."""
        return self.labels in ("better text", "relevance")

    @property
    def reads_two_words(self) -> bool:
        """Whether it reads of a language model's head how likely two words are, and nothing else."""
        return self.labels == "relevance in words"

    @property
    def has_new_head(self) -> bool:
        """Whether the model ends in a new head, which is trained whole beside adapters."""
        return self.classifies or self.scores

    @property
    def pools_texts(self) -> bool:
        """Whether the output is of each text's last token, which decoders tell by the padding."""
        return self.classifies_texts or self.scores

    @property
    def classifies_texts(self) -> bool:
        """Whether each text has one class."""
        return self.labels == "class" and self.reads_text

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return "tokens" if self.medium in ("text", "images and text") else "samples"
