"""Sound as training data: files of waves, and what is said in them or which class they are. A batch is made by the
model's own feature extractor when it is taken."""

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from autofit.core.errors import InputError, as_input_error, pluralize, sentence
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.batch import IGNORED_LABEL
from autofit.data.columnar import Stored
from autofit.data.labels import labels_from
from autofit.data.options import DataOptions
from autofit.data.processors import Processing
from autofit.data.rows import named_file, read_rows
from autofit.data.samples import FileLoader


@dataclass(frozen=True)
class Recordings:
    """Files of sound; the feature extractor is asked for a batch when it is taken."""

    files: Sequence[str | Stored]
    locations: Sequence[str]
    labels: torch.Tensor | Sequence[torch.Tensor]  # the class of each, or the tokens that are said
    processing: Processing

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        extractor = self.processing.processor
        rate, indices = int(extractor.sampling_rate), chosen.tolist()
        waves = [_wave(self.files[index], rate, self.locations[index]) for index in indices]
        # Some pad to a length of their own unless told otherwise; others not at all.
        padding = inspect.signature(extractor.__call__).parameters.get("padding")
        options: dict[str, Any] = {} if padding is None or padding.default else {"padding": True}
        with as_input_error(
            lambda error: (
                f"the model's feature extractor does not take this sound: {sentence(error)}."
            )
        ):
            made = extractor(waves, sampling_rate=rate, return_tensors="pt", **options)
        batch = {name: part for name, part in made.items() if name in self.processing.arguments}
        if isinstance(self.labels, torch.Tensor):
            return {**batch, "labels": self.labels[chosen]}
        said = [self.labels[index] for index in indices]
        return {
            **batch,
            "labels": pad_sequence(said, batch_first=True, padding_value=IGNORED_LABEL),
        }

    def largest_id(self) -> int:
        said = () if isinstance(self.labels, torch.Tensor) else self.labels
        return max((int(row.max()) for row in said if len(row)), default=0)


def sound_loader(
    workload: Workload, path: Path, tokenizer: Any, processing: Processing, options: DataOptions
) -> FileLoader:
    """The loader of a file whose rows name files of sound, for a model with that feature extractor."""
    for package in ("soundfile", "soxr"):
        if importlib.util.find_spec(package) is None:
            message = (
                f"{path} names files of sound, which {package} reads, and it is not installed."
            )
            raise InputError(message, "Install both that are needed: pip install soundfile soxr.")
    task = TASKS[workload.task]
    rows = read_rows(path, task.rows)
    folder = path if path.is_dir() else path.parent
    located = list(zip(rows.columns["audio"], rows.locations, strict=True))
    files = [named_file(name, folder, location, "sound") for name, location in located]
    seconds = [_seconds(file, location) for file, (_, location) in zip(files, located, strict=True)]
    notes = list(rows.notes)
    longest = getattr(processing.processor, "chunk_length", None)
    if longest and (cut := sum(each > longest for each in seconds)):
        notes.append(f"cut to {longest} s of sound: {cut} of {pluralize(len(files), 'sample')}.")
    shape: tuple[int, ...] = getattr(workload.batch, "shape", ())
    if len(shape) == 1 and max(seconds) > (
        measured := shape[0] / processing.processor.sampling_rate
    ):
        of_sound = (
            f"sound is up to {max(seconds):.3g} s long, and that of a search {measured:.3g} s"
        )
        notes.append(
            f"{of_sound}: training may need more memory, and more time, than was measured."
        )

    size = workload.effective_batch_size
    if task.classifies:
        classes = labels_from(rows.columns["label"], rows.locations, options.labels)
        samples = Recordings(files, rows.locations, classes.numbers, processing)
        return FileLoader(samples, size, notes=tuple(notes), label_names=classes.names, ahead=True)

    said, note = _said(
        tokenizer, rows.columns["transcript"], processing.start, workload.sequence_length
    )
    notes += note
    samples = Recordings(files, rows.locations, said, processing)
    if processing.samples_a_label:
        samples, note = _long_enough(samples, seconds, processing.samples_a_label)
        notes += note
    return FileLoader(samples, size, notes=tuple(notes), ahead=True)


def _said(
    tokenizer: Any, texts: list[str], start: int | None, length: int | None
) -> tuple[list[torch.Tensor], list[str]]:
    """The tokens of transcripts, without the one that the model itself begins with, cut to the length; and notes."""
    rows = [list(row) for row in tokenizer(texts, verbose=False)["input_ids"]]
    rows = [row[1:] if row[:1] == [start] else row for row in rows]
    notes, unknown = [], tokenizer.unk_token_id
    if unknown is not None and (strange := sum(unknown in row for row in rows)):
        notes.append(
            f"with characters that the tokenizer does not know: {strange} of {pluralize(len(rows), 'sample')}."
        )
    if cut := sum(length is not None and len(row) > length for row in rows):
        notes.append(f"cut to {length} tokens: {cut} of {pluralize(len(rows), 'sample')}.")
    return [torch.tensor(row[:length], dtype=torch.long) for row in rows], notes


def _long_enough(
    samples: Recordings, seconds: list[float], samples_a_label: int
) -> tuple[Recordings, list[str]]:
    """The recordings that have an output of the model for each of their labels, and one between equal ones, without
    which a CTC loss is infinite."""
    rate = int(samples.processing.processor.sampling_rate)
    needed = [len(said) + int((said[1:] == said[:-1]).sum()) for said in samples.labels]
    kept = [n for n, each in enumerate(seconds) if int(each * rate) // samples_a_label > needed[n]]
    if len(kept) == len(samples):
        return samples, []
    of_all = pluralize(len(samples), "sample")
    if not kept:
        message = f"no sound is long enough for what is said in it, in {of_all}."
        raise InputError(message, "Check that files and transcripts belong together.")
    files, locations, labels = samples.files, samples.locations, samples.labels
    note = f"left out, too short for what is said in them: {len(samples) - len(kept)} of {of_all}."
    parts = [files[n] for n in kept], [locations[n] for n in kept], [labels[n] for n in kept]
    return Recordings(*parts, samples.processing), [note]


def _seconds(file: str | Stored, location: str) -> float:
    """How long a file of sound is, by its head."""
    import soundfile

    with _readable(file, location):
        seconds = float(soundfile.info(_opened(file)).duration)
    if not seconds:
        raise InputError(f"{location}: {file} holds no sound.", "Remove it.")
    return seconds


def _wave(file: str | Stored, rate: int, location: str) -> Any:
    """The mean of a file's channels at a rate."""
    import soundfile
    import soxr

    with _readable(file, location):
        wave, found = soundfile.read(_opened(file), dtype="float32", always_2d=True)
        return soxr.resample(wave.mean(axis=1), found, rate)


def _opened(file: str | Stored) -> Any:
    return file.source() if isinstance(file, Stored) else file


def _readable(file: str | Stored, location: str) -> Any:
    message = f"{location}: the sound {file} cannot be read: {{}}.".format
    return as_input_error(
        lambda error: message(type(error).__name__),
        "Repair or remove it; WAV, FLAC, Ogg and MP3 are read.",
    )
