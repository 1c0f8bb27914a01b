"""Columns that a function makes of others, in a file that is mapped into memory."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
from datasets.fingerprint import Hasher

from autofit.core.notebook import in_notebook
from autofit.data.data_cache import cached_folder, code_digest

_MAPPED = "rows.arrow"
_ROWS = 64  # that are in memory at once: they may be images


Columns = dict[str, list[Any]]


def cached_map(
    columns: Mapping[str, Any],
    function: Callable[[Columns], Columns],
    *,
    features: Mapping[str, Any],
    key: Any,
    progress: str | None,
) -> datasets.Dataset:
    """`function` on batches of the columns, taken from the cache when it is there.

    Args:
        features: of what the function returns.
        key: what the outcome depends on beside the columns and the code of this room.
        progress: the label of the bar on stderr; None for no bar.
    """
    data = datasets.Dataset.from_dict(dict(columns))
    name = Hasher.hash((data._fingerprint, code_digest(), key))

    # The switch for bars is one for the whole process and belongs to its user.
    is_wanted = progress is not None and (sys.stderr.isatty() or in_notebook())
    hides_bars = not is_wanted and not datasets.are_progress_bars_disabled()

    def build(folder: Path) -> None:
        data.map(
            function,
            batched=True,
            batch_size=_ROWS,
            writer_batch_size=_ROWS,
            remove_columns=data.column_names,
            features=datasets.Features(features),
            cache_file_name=str(folder / _MAPPED),
            new_fingerprint=name,
            desc=progress,
        )

    if hides_bars:
        datasets.disable_progress_bars()
    try:
        file = cached_folder(name, build) / _MAPPED
    finally:
        if hides_bars:
            datasets.enable_progress_bars()

    return datasets.Dataset.from_file(str(file))
