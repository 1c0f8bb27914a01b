"""Which task a config.json is for: as asked, or as the class says that its checkpoint was saved
from."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from autofit.core.errors import InputError
from autofit.core.task import MULTIMODAL, Task
from autofit.core.tasks import TASKS, task_of_class
from autofit.core.tasks.custom import CUSTOM
from autofit.core.tasks.image_text_to_text import IMAGE_TEXT_TO_TEXT
from autofit.models.tasks import auto_class, forward_arguments, model_classes, text_task
from autofit.models.tasks.sizes import YOUR_FUNCTION

# Kinds that take no text alone although their forward could: GIT's loss leaves out the positions of
# an image, whether there is one or not.
_WITH_IMAGES = ("git", "idefics", "kosmos-2", "pp_formulanet")
# What kinds are trained for on texts that can embed them, too.
_OF_ONE_TEXT = ("next tokens", "hidden tokens", "class")


def chosen_task(config: Mapping[str, Any], asked: str | None, label: str) -> str:
    """The name of the task of a config.

    Args:
        config: the config.json; `label` names it in messages.
        asked: the task that is asked for, if any.

    Raises:
        InputError: it is not for the task asked for, or does not say what it is for.
    """
    kind = str(config.get("model_type"))
    own_code = set(config.get("auto_map") or ())
    if asked is not None:
        if not _has_class(TASKS[asked], kind, own_code):
            message = f"{label} is of {kind}, which transformers has no model of for {asked}."
            raise InputError(message, remedy_for(kind))

        return asked

    names = config.get("architectures")
    if not isinstance(names, list):
        names = []
    names = [name for name in names if isinstance(name, str)]
    if not names:
        message = f"{label} does not say in `architectures` what the model is for."
        raise InputError(message, remedy_for(kind))

    for name in names:
        task = _task_of_class(name, kind, own_code)
        if task is not CUSTOM:
            return task.name

    message = f"{label} is of {', '.join(names)}, which does not say what to train it for."
    raise InputError(message, remedy_for(kind))


def _task_of_class(name: str, kind: str, own_code: AbstractSet[str]) -> Task:
    """What a class of transformers, or of the checkpoint's own code, is trained for; `custom` where
    it is not known."""
    import transformers

    if any(name in model_classes(auto, kind) for auto in MULTIMODAL):
        model_class = getattr(transformers, name)
        required = forward_arguments(model_class, required=True)
        accepted = forward_arguments(model_class)
        if "pixel_values" in required or "input_ids" not in accepted or kind in _WITH_IMAGES:
            return IMAGE_TEXT_TO_TEXT

        return text_task(kind)

    for task in TASKS.values():
        is_bare = task.labels == "none"  # which may be trained for anything
        if not is_bare and any(name in model_classes(auto, kind) for auto in task.auto_classes):
            return task

    found = task_of_class(name)
    for task in TASKS.values():
        if found is CUSTOM and name.endswith(task.saved_as):
            found = task

    if not _has_class(found, kind, own_code):
        return CUSTOM
    return found


def _has_class(task: Task, kind: str, own_code: AbstractSet[str]) -> bool:
    """Whether transformers, or the checkpoint's own code, has a model of this kind for the task."""
    return auto_class(task, kind) is not None or not own_code.isdisjoint(task.auto_classes)


def remedy_for(kind: str) -> str:
    """What to do about a config whose task is not known: the tasks that transformers has a model of
    this kind for."""
    tasks = []
    for task in TASKS.values():
        is_of_another = task.frozen or task.scores or task.reads_two_words or task.generated
        if is_of_another or task.medium == "preferences":
            continue
        if auto_class(task, kind):
            tasks.append(task)

    if not any(task.reads_text and task.labels in _OF_ONE_TEXT for task in tasks):
        tasks = [task for task in tasks if task.labels != "none"]
    if not tasks:
        return YOUR_FUNCTION

    names = ", ".join(task.name for task in tasks)
    return f"Say what to train it for, --task {names}. {YOUR_FUNCTION}"
