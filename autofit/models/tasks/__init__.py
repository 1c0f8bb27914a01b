"""The part of tasks that needs torch or transformers: batches that stand for their data, and
classes of models.

A task is a file of `core.tasks`; a file is here for each medium that batches are made of.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from autofit.core.task import MULTIMODAL, Task
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.core.tasks.seq2seq import SEQ2SEQ
from autofit.models.tasks.completions import completion_batches
from autofit.models.tasks.image_text import image_text_batches
from autofit.models.tasks.images import image_batches
from autofit.models.tasks.preferences import preference_batches
from autofit.models.tasks.sound import sound_batches
from autofit.models.tasks.text import text_batches
from autofit.models.tasks.text_pairs import pair_batches

# The batches of each medium: with `loss` for models that have none of their own, with `count` where
# what the loss is a mean over is not what `Workload` takes by default.
BATCHES = {
    "text": text_batches,
    "pairs of texts": pair_batches,
    "preferences": preference_batches,
    "completions": completion_batches,
    "images": image_batches,
    "videos": image_batches,
    "sound": sound_batches,
    "images and text": image_text_batches,
}


def auto_class(task: Task, kind: str, architectures: Iterable[object] = ()) -> str | None:
    """The auto class that makes models of a kind (a model_type) for a task: the first that lists
    one of the classes named, else the first that has any; None where there is none."""
    known = [name for name in task.auto_classes if model_classes(name, kind)]
    if task.reads_text and task.name != text_task(kind).name:
        known = [name for name in known if name not in MULTIMODAL]

    classes = set(map(str, architectures))
    for name in known:
        if not classes.isdisjoint(model_classes(name, kind)):
            return name

    return known[0] if known else None


def text_task(kind: str) -> Task:
    """What a kind that takes more than text is trained for on text alone."""
    from transformers import CONFIG_MAPPING

    apart = kind in CONFIG_MAPPING and getattr(
        CONFIG_MAPPING[kind],
        "is_encoder_decoder",
        False,
    )
    return SEQ2SEQ if apart else CAUSAL_LM


def forward_arguments(model_class: Any, *, required: bool = False) -> tuple[str, ...]:
    """The names that a class's forward takes, or only those that it cannot do without."""
    names = []
    for name, argument in inspect.signature(model_class.forward).parameters.items():
        is_named = name != "self" and argument.kind not in (
            argument.VAR_POSITIONAL,
            argument.VAR_KEYWORD,
        )
        if is_named and not (required and argument.default is not argument.empty):
            names.append(name)

    return tuple(names)


def model_classes(auto: str, kind: str) -> tuple[str, ...]:
    """The names of the classes that an auto class has for a model_type."""
    import transformers

    names = getattr(transformers, auto)._model_mapping._model_mapping.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)
