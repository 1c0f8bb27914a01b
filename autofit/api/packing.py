"""What data of the user's own say of a workload: how long its samples are, and whether packed ones
make more of a step's tokens count."""

import dataclasses
from pathlib import Path

from autofit.api.file_reader import FileReader
from autofit.core.errors import InputError
from autofit.core.files import expanded
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.options import DataOptions
from autofit.data.samples import Packed
from autofit.models import HuggingFaceModel
from autofit.models.tasks.text import KEEPS_APART, RandomTokens
from autofit.report.formatting import percent


def with_data(
    workload: Workload,
    data: str | Path,
    weights: str | Path | None,
    *,
    tolerance: float,
    trusted: bool,
) -> Workload:
    """The workload of training on a file, its samples packed or padded.

    A step takes as long with padding as with tokens, so samples are packed where the share of
    padding makes that faster by more than `tolerance`. Plain text is always packed, and attends to
    what is before it. Other packed samples are kept apart where the model can do that, and measured
    so. Samples of two texts are padded.

    Raises:
        InputError: a model that no file is read for, or a file that is none for it.
    """
    factory = workload.model
    path = expanded(data, "data")
    task = TASKS[workload.task]
    are_continued = task.packs and task.predicts_next_token
    have_two_texts = task.of_texts and not task.reads_text
    if not (are_continued or have_two_texts) or not isinstance(factory, HuggingFaceModel):
        message = (
            "a search reads data of named language models, of preferences and of pairs of texts, "
            f"and the task is {workload.task}."
        )
        raise InputError(message, "Leave out the data.")
    if weights is not None and not (isinstance(weights, str) and weights):
        weights = expanded(weights, "weights")

    # Whatever tokens are learnt, the lengths of samples are the same.
    options = DataOptions(learn="all")
    reader = FileReader(workload, factory, weights, trusted, options, lambda _: None)
    loader = reader.loader(path)
    lengths = loader.lengths
    assert lengths, "texts that can be packed have lengths"

    workload = dataclasses.replace(
        workload,
        data=str(path.resolve()),
        form=loader.form,
        padding=lengths.padding,
    )
    share = percent(lengths.padding)
    note = f"{path.name}: {lengths}; padded, {share} of a batch is padding"
    if have_two_texts:
        return dataclasses.replace(workload, notes=(*workload.notes, f"{note}."))

    workload = dataclasses.replace(workload, data_tokens=round(lengths.samples * lengths.mean))
    is_text = isinstance(loader.samples, Packed)
    is_faster = 1 / (1 - lengths.padding) > 1 + tolerance
    packing = is_text or (is_faster and lengths.samples >= workload.effective_batch_size)
    how = "samples are padded"
    if packing:
        how = "samples are packed, and see those before them"

    batch = workload.batch
    can_separate = factory.config.get("model_type") in KEEPS_APART
    if packing and not is_text and can_separate and isinstance(batch, RandomTokens):
        how = "samples are packed, and do not see one another"
        length = max(1, round(lengths.mean))
        batch = dataclasses.replace(batch, document_tokens=length)
        workload = dataclasses.replace(workload, batch=batch, document_tokens=length)

    return dataclasses.replace(
        workload, notes=(*workload.notes, f"{note}: {how}."), packing=packing
    )
