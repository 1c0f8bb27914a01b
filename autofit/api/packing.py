"""Whether a search is for packed or for padded samples: what data of the user's own say, by tokens that count."""

import dataclasses
from pathlib import Path

from autofit.api.file_reader import FileReader
from autofit.core.errors import InputError
from autofit.core.files import expanded
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.options import DataOptions
from autofit.data.samples import Stacked
from autofit.models import HuggingFaceModel
from autofit.models.tasks.text import KEEPS_APART, RandomTokens
from autofit.report.formatting import percent


def with_data(
    workload: Workload, data: str | Path, weights: str | Path | None, *, tolerance: float, trusted: bool
) -> Workload:
    """The workload of training on a file, whose samples are packed where that makes more tokens count in the same time,
    by more than `tolerance`, than padding does. A step takes as long with padding as with tokens, so that the share of
    padding decides. Plain text is always packed, and sees what is before it; other packed samples do not see one
    another where the model can do that, and are measured so.

    Raises:
        InputError: a model that no file is read for, or a file that is none for it.
    """
    factory, path = workload.model, expanded(data, "data")
    if not TASKS[workload.task].continues_text or not isinstance(factory, HuggingFaceModel):
        message = f"data choose between packing and padding for named language models, and the task is {workload.task}."
        raise InputError(message, "Leave out the data.")
    if weights is not None and not (isinstance(weights, str) and weights):
        weights = expanded(weights, "weights")
    options = DataOptions(learn="all")  # lengths are the same, and a search need not know which tokens are learnt
    reader = FileReader(workload, factory, weights, trusted, options, lambda _: None)
    loader = reader.loader(path)
    lengths, is_text = loader.lengths, isinstance(loader.samples, Stacked)
    assert lengths, "texts that can be packed have lengths"
    gain = 1 / (1 - lengths.padding)
    packing = is_text or (gain > 1 + tolerance and lengths.samples >= workload.effective_batch_size)
    why = "samples are packed, and see those before them" if packing else "samples are padded"
    batch, kind = workload.batch, factory.config.get("model_type")
    if packing and not is_text and kind in KEEPS_APART and isinstance(batch, RandomTokens):
        why, length = "samples are packed, and do not see one another", max(1, round(lengths.mean))
        batch = dataclasses.replace(batch, document_tokens=length)
        workload = dataclasses.replace(workload, batch=batch, document_tokens=length)
    note = f"{path.name}: {lengths}; padded, {percent(lengths.padding)} of a batch is padding: {why}."
    notes = (*workload.notes, note)
    workload = dataclasses.replace(workload, data=str(path.resolve()), form=loader.form)
    return dataclasses.replace(workload, notes=notes, packing=packing, padding=lengths.padding)
