"""Files as training data: a path and a task become a FileLoader of effective batches.

Text, JSON lines, CSV and data sets on disk are read (`rows`), numbered where they are classes (`labels`), made token
ids (`tokens`), and packed or padded (`text`); `images` reads images. Which batches come out of the samples, and in
which order, is `file_loader`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.byte_tokenizer import byte_tokenizer
from autofit.data.file_loader import FileLoader
from autofit.data.images import read_folder, read_tensors
from autofit.data.options import DataOptions
from autofit.data.rows import not_there
from autofit.data.text import text_loader


def file_loader(workload: Workload, path: Path, *, tokenizer: Any, options: DataOptions | None = None) -> FileLoader:
    """The loader of a data file or directory for a named model's task.

    Args:
        tokenizer: a transformers tokenizer; None takes the bytes of the text as token ids. One without a chat template
            is given a simple one when the data is messages.

    Raises:
        InputError: the file is not there, is empty, or does not have what the task needs.
    """
    options = options or DataOptions()
    if options.packing is not None and workload.task not in ("causal-lm", "masked-lm"):
        message = f"packing and padding are for language models, and the task is {workload.task}."
        raise InputError(message, "Leave out --packing and --padding.")
    if not path.exists():
        raise not_there(path)
    if workload.task == "image-classification":
        return _images(workload, path, options)
    return text_loader(workload, path, byte_tokenizer() if tokenizer is None else tokenizer, options)


def _images(workload: Workload, path: Path, options: DataOptions) -> FileLoader:
    shape = workload.batch(1)["pixel_values"].shape[1:]
    if not path.is_dir():
        return FileLoader(read_tensors(path, shape, options.labels), workload.effective_batch_size)
    pictures, labels = read_folder(path, shape, options)
    return FileLoader(pictures, workload.effective_batch_size, label_names=labels.names)
