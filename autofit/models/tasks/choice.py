"""Which task a config.json is for: as asked, or as the class says that its checkpoint was saved from."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from autofit.core.errors import InputError
from autofit.core.workload import CLASS_SUFFIXES
from autofit.models.tasks import MULTIMODAL, TASKS, auto_class, forward_arguments, model_classes, text_task
from autofit.models.tasks.sizes import YOUR_FUNCTION

# Kinds that take no text alone although their forward could: GIT's loss leaves out the positions of an image, whether
# there is one or not.
_WITH_IMAGES = ("git", "idefics", "kosmos-2", "pp_formulanet")


def chosen_task(config: Mapping[str, Any], asked: str | None, label: str) -> str:
    """The task of a config. Raises InputError: it is not for the task asked for, or does not say what it is for.

    Args:
        config: the config.json; `label` names it in messages.
        asked: the task that is asked for, if any.
    """
    kind, architectures = str(config.get("model_type")), config.get("architectures")
    own_code = {*(config.get("auto_map") or {})}
    if asked is not None:
        if auto_class(asked, kind) is None and not {*TASKS[asked].auto_classes} & own_code:
            message = f"{label} is of {kind}, which transformers has no model of for {asked}."
            raise InputError(message, remedy_for(kind))
        return asked
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if not names:
        raise InputError(f"{label} does not say in `architectures` what the model is for.", remedy_for(kind))
    task = next((task for name in names if (task := _task_of_class(name, kind, own_code))), None)
    if task is None:
        message = f"{label} is of {', '.join(names)}, which does not say what to train it for."
        raise InputError(message, remedy_for(kind))
    return task


def _task_of_class(name: str, kind: str, own_code: AbstractSet[str]) -> str | None:
    import transformers

    if any(name in model_classes(auto, kind) for auto in MULTIMODAL):
        model_class = getattr(transformers, name)
        required, accepted = forward_arguments(model_class, required=True), forward_arguments(model_class)
        if "pixel_values" in required or "input_ids" not in accepted or kind in _WITH_IMAGES:
            return "image-text-to-text"
        return text_task(kind)
    for task, each in TASKS.items():  # a bare model may be trained for anything
        if task != "embeddings" and any(name in model_classes(auto, kind) for auto in each.auto_classes):
            return task
    suffixes = {**CLASS_SUFFIXES, "ForPreTraining": "masked-lm"}  # of BERT's checkpoints
    found = next((task for suffix, task in suffixes.items() if name.endswith(suffix)), None)
    return found if found and (auto_class(found, kind) or {*TASKS[found].auto_classes} & own_code) else None


def remedy_for(kind: str) -> str:
    """What to do about a config whose task is not known: the tasks that transformers has a model of this kind for."""
    tasks = [task for task in TASKS if auto_class(task, kind)]
    if not {"causal-lm", "masked-lm", "sequence-classification"} & {*tasks}:  # embeddings are of texts
        tasks = [task for task in tasks if task != "embeddings"]
    says = [f"Say what to train it for, --task {', '.join(tasks)}."] if tasks else []
    return " ".join([*says, YOUR_FUNCTION])
