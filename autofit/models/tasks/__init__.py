"""Tasks: what models are trained for, the classes of transformers that are, and batches that stand for the data.

A new task is a line of TASKS, and a file here where its batches have a new form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autofit.models.tasks.embeddings import pair_batches, pair_loss
from autofit.models.tasks.image_text import image_text_batches
from autofit.models.tasks.images import boxes, image_batches
from autofit.models.tasks.sizes import Asked
from autofit.models.tasks.sound import sound_batches
from autofit.models.tasks.text import text_batches


@dataclass(frozen=True)
class Task:
    """One task: the auto classes of transformers whose models are trained for it, the first before the next; what makes
    its batches; the loss, where the model has none of its own; and batch -> the number that the loss is a mean over,
    where that is not what `Workload` takes by default."""

    auto_classes: tuple[str, ...]
    batches: Callable[[Asked], Any]
    loss: Callable[[Any, Any], Any] | None = None
    count: Callable[[Any], int] | None = None


MULTIMODAL = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
# In the order in which the classes of a config.json are looked up: BART's is listed as masked-lm, too.
TASKS = {
    "speech-seq2seq": Task(("AutoModelForSpeechSeq2Seq",), sound_batches),
    "seq2seq": Task(("AutoModelForSeq2SeqLM", *MULTIMODAL), text_batches),
    "causal-lm": Task(("AutoModelForCausalLM", *MULTIMODAL), text_batches),
    "masked-lm": Task(("AutoModelForMaskedLM",), text_batches),
    "sequence-classification": Task(("AutoModelForSequenceClassification",), text_batches),
    "token-classification": Task(("AutoModelForTokenClassification",), text_batches),
    "question-answering": Task(("AutoModelForQuestionAnswering",), text_batches),
    "image-classification": Task(("AutoModelForImageClassification",), image_batches),
    "semantic-segmentation": Task(("AutoModelForSemanticSegmentation",), image_batches),
    "object-detection": Task(("AutoModelForObjectDetection",), image_batches, count=boxes),
    "video-classification": Task(("AutoModelForVideoClassification",), image_batches),
    "audio-classification": Task(("AutoModelForAudioClassification",), sound_batches),
    "ctc": Task(("AutoModelForCTC",), sound_batches),
    "image-text-to-text": Task(MULTIMODAL, image_text_batches),
    "embeddings": Task(("AutoModel",), pair_batches, pair_loss),
}


def auto_class(task: str, kind: str, architectures: Iterable[object] = ()) -> str | None:
    """The auto class that makes models of a kind (a model_type) for a task: the first that lists one of the classes
    named, else the first that has any; None where there is none."""
    known = [name for name in TASKS[task].auto_classes if model_classes(name, kind)]
    if task != text_task(kind):
        known = [name for name in known if name not in MULTIMODAL or task == "image-text-to-text"]
    names = set(map(str, architectures))
    return next((name for name in known if names & set(model_classes(name, kind))), known[0] if known else None)


def text_task(kind: str) -> str:
    """What a kind that takes more than text is trained for on text alone."""
    from transformers import CONFIG_MAPPING

    apart = kind in CONFIG_MAPPING and getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)
    return "seq2seq" if apart else "causal-lm"


def forward_arguments(model_class: Any, *, required: bool = False) -> tuple[str, ...]:
    """The names that a class's forward takes, or only those that it cannot do without."""
    given = inspect.signature(model_class.forward).parameters.values()
    named = [each for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name != "self"]
    return tuple(each.name for each in named if not required or each.default is each.empty)


def model_classes(auto: str, kind: str) -> tuple[str, ...]:
    """The names of the classes that an auto class has for a model_type."""
    import transformers

    names = getattr(transformers, auto)._model_mapping._model_mapping.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)
