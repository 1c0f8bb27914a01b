"""A path and a task become a FileLoader."""

from pathlib import Path
from typing import Any

from autofit.core.errors import InputError
from autofit.core.files import check_readable
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.contents import READABLE
from autofit.data.image_text import image_text_loader
from autofit.data.images import image_loader
from autofit.data.options import DataOptions
from autofit.data.processors import Processing
from autofit.data.samples import FileLoader
from autofit.data.sound import sound_loader
from autofit.data.text import text_loader

# What tensors, arrays and archives are kept in.
_NO_ROWS = (
    ".pt",
    ".pth",
    ".ckpt",
    ".safetensors",
    ".gguf",
    ".npy",
    ".npz",
    ".pkl",
    ".zip",
    ".h5",
)


def file_loader(
    workload: Workload,
    path: Path,
    *,
    tokenizer: Any,
    options: DataOptions,
    processing: Processing | None = None,
) -> FileLoader:
    """The loader of data for a named model's task.

    Args:
        tokenizer: without one, the bytes of the text are its token ids.
        processing: for sound, and for images with text.

    Raises:
        InputError: the file cannot be read, or does not fit the task.
    """
    task = TASKS[workload.task]
    if not task.rows:
        message = f"autofit train reads no files for {task.name}."
        raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")

    if options.packing is not None and not task.packs:
        message = f"packing and padding are for language models, and the task is {task.name}."
        raise InputError(message, "Leave out --packing and --padding.")

    check_readable(path, "the data file")
    if task.medium == "images":
        return image_loader(workload, path, options)
    if path.is_file() and path.suffix.lower() in _NO_ROWS:  # by its name: it may be cut short
        message = f"the data file {path} is named as one of {path.suffix}, which holds no rows."
        raise InputError(message, READABLE)

    if tokenizer is None:
        tokenizer = byte_tokenizer()
    if processing is None:
        return text_loader(workload, path, tokenizer, options)
    if task.medium == "sound":
        return sound_loader(workload, path, tokenizer, processing, options)

    return image_text_loader(workload, path, processing, options)
