"""A path and a task become a FileLoader."""

from pathlib import Path
from typing import Any

from autofit.core.errors import InputError
from autofit.core.files import check_readable
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.image_text import image_text_loader
from autofit.data.images import image_loader
from autofit.data.options import DataOptions
from autofit.data.processors import Processing
from autofit.data.samples import FileLoader
from autofit.data.sound import SOUND, sound_loader
from autofit.data.text import FORMS, PACKED, text_loader

PROCESSED = ("image-text-to-text", *SOUND)  # tasks whose batches the model's own processor makes


def file_loader(
    workload: Workload,
    path: Path,
    *,
    tokenizer: Any,
    options: DataOptions,
    processing: Processing | None = None,  # for the tasks of PROCESSED
) -> FileLoader:
    """The loader of data for a named model's task; without a tokenizer, the bytes of the text are its token ids."""
    if workload.task not in (*FORMS, *PROCESSED, "image-classification"):
        message = f"autofit train reads no files for {workload.task}."
        raise InputError(message, "Train it in Python: autofit.fit(model, loader, config=...).")
    if options.packing is not None and workload.task not in PACKED:
        message = f"packing and padding are for language models, and the task is {workload.task}."
        raise InputError(message, "Leave out --packing and --padding.")
    check_readable(path, "the data file")
    if workload.task == "image-classification":
        return image_loader(workload, path, options)
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    if processing is None:
        return text_loader(workload, path, tokenizer, options)
    if workload.task in SOUND:
        return sound_loader(workload, path, tokenizer, processing, options)
    return image_text_loader(workload, path, processing, options)
