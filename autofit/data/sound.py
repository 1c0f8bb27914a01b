"""Sound as training data: files of waves, and what is said in them or which class they are.

The model's own feature extractor makes a batch when it is taken.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from autofit.core.errors import InputError, pluralize
from autofit.core.tasks import TASKS
from autofit.core.workload import Workload
from autofit.data.columnar import MediaFile, Stored
from autofit.data.failures import failing_as, kind_of_error
from autofit.data.labels import labels_from
from autofit.data.options import IGNORED_LABEL, DataOptions
from autofit.data.processors import Processing
from autofit.data.rows import named_file, read_rows
from autofit.data.samples import Batch, FileLoader, share_note


@dataclass(frozen=True)
class Recordings:
    """Files of sound; the feature extractor is asked for a batch when it is taken.

    Attributes:
        labels: the class of each file, [files], or the tokens that are said in each.
    """

    files: Sequence[MediaFile]
    locations: Sequence[str]
    labels: torch.Tensor | Sequence[torch.Tensor]
    processing: Processing

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, chosen: torch.Tensor) -> Batch:
        extractor = self.processing.processor
        rate = int(extractor.sampling_rate)
        indices = chosen.tolist()
        waves = [_wave(self.files[index], rate, self.locations[index]) for index in indices]

        # Some extractors pad to a length of their own unless told otherwise; others not at all.
        options = {}
        padding = inspect.signature(extractor.__call__).parameters.get("padding")
        if padding is not None and not padding.default:
            options["padding"] = True
        with failing_as("the model's feature extractor does not take this sound"):
            made = extractor(waves, sampling_rate=rate, return_tensors="pt", **options)

        batch = {name: part for name, part in made.items() if name in self.processing.arguments}
        if isinstance(self.labels, torch.Tensor):
            batch["labels"] = self.labels[chosen]
        else:
            said = [self.labels[index] for index in indices]
            batch["labels"] = pad_sequence(
                said,
                batch_first=True,
                padding_value=IGNORED_LABEL,
            )

        return batch

    def largest_id(self) -> int:
        if isinstance(self.labels, torch.Tensor):  # classes are no tokens
            return 0
        return max((int(said.max()) for said in self.labels if len(said)), default=0)


def sound_loader(
    workload: Workload,
    path: Path,
    tokenizer: Any,
    processing: Processing,
    options: DataOptions,
) -> FileLoader:
    """The loader of a file whose rows name files of sound, for a model with that extractor."""
    for package in ("soundfile", "soxr"):
        if importlib.util.find_spec(package) is None:
            message = (
                f"{path} names files of sound, which {package} reads, and it is not installed."
            )
            raise InputError(message, "Install both that are needed: pip install soundfile soxr.")

    task = TASKS[workload.task]
    rows = read_rows(path, task.rows)
    folder = path if path.is_dir() else path.parent
    files = []
    for name, location in zip(rows.columns["audio"], rows.locations, strict=True):
        files.append(named_file(name, folder, location, "sound"))
    seconds = list(map(_seconds, files, rows.locations))

    notes = [*rows.notes, *_length_notes(workload, processing, seconds)]
    size = workload.effective_batch_size
    if task.classifies:
        classes = labels_from(rows.columns["label"], rows.locations, options.labels)
        samples = Recordings(files, rows.locations, classes.numbers, processing)
        return FileLoader(
            samples,
            size,
            notes=tuple(notes),
            label_names=classes.names,
            ahead=True,
        )

    texts = rows.columns["transcript"]
    said = _said(tokenizer, texts, processing.start, workload.sequence_length, notes)
    samples = Recordings(files, rows.locations, said, processing)
    if processing.samples_a_label:
        samples = _long_enough(samples, seconds, processing.samples_a_label, notes)

    return FileLoader(samples, size, notes=tuple(notes), ahead=True)


def _length_notes(workload: Workload, processing: Processing, seconds: list[float]) -> list[str]:
    """Notes on sound that is cut, or longer than what a search measured."""
    notes = []
    most = getattr(processing.processor, "chunk_length", None)
    if most:
        cut = sum(length > most for length in seconds)
        if cut:
            notes.append(share_note(f"cut to {most} s of sound", cut, len(seconds)))

    shape: tuple[int, ...] = getattr(workload.batch, "shape", ())
    if len(shape) == 1:
        longest = max(seconds)
        measured = shape[0] / processing.processor.sampling_rate
        if longest > measured:
            notes.append(
                f"sound is up to {longest:.3g} s long, and that of a search {measured:.3g} s: "
                "training may need more memory, and more time, than was measured."
            )

    return notes


def _said(
    tokenizer: Any,
    texts: list[str],
    start: int | None,
    length: int | None,
    notes: list[str],
) -> list[torch.Tensor]:
    """The tokens of each transcript, cut to the length.

    Args:
        start: the token that the model itself begins with, which is left out.
        notes: gets notes on transcripts that are cut, or that the tokenizer cannot write.
    """
    said = []
    unknown = 0
    cut = 0
    for tokens in tokenizer(texts, verbose=False)["input_ids"]:
        row = list(tokens)
        if row[:1] == [start]:
            row = row[1:]
        unknown += tokenizer.unk_token_id in row
        cut += length is not None and len(row) > length
        said.append(torch.tensor(row[:length], dtype=torch.long))

    if unknown:
        what = "with characters that the tokenizer does not know"
        notes.append(share_note(what, unknown, len(said)))

    if cut:
        notes.append(share_note(f"cut to {length} tokens", cut, len(said)))

    return said


def _long_enough(
    samples: Recordings,
    seconds: list[float],
    samples_a_label: int,
    notes: list[str],
) -> Recordings:
    """The recordings for which a CTC loss is finite.

    They have an output of the model for each of their labels, and one between equal ones.
    """
    rate = int(samples.processing.processor.sampling_rate)
    kept = []
    for number, said in enumerate(samples.labels):
        needed = len(said) + int((said[1:] == said[:-1]).sum())
        if int(seconds[number] * rate) // samples_a_label > needed:
            kept.append(number)

    left_out = len(samples) - len(kept)
    if not left_out:
        return samples
    if not kept:
        of_all = pluralize(len(samples), "sample")
        message = f"no sound is long enough for what is said in it, in {of_all}."
        raise InputError(message, "Check that files and transcripts belong together.")

    notes.append(
        share_note(
            "left out, too short for what is said in them",
            left_out,
            len(samples),
        )
    )
    parts: dict[str, Any] = {}
    for name in ("files", "locations", "labels"):
        values = getattr(samples, name)
        parts[name] = [values[number] for number in kept]

    return replace(samples, **parts)


def _seconds(file: MediaFile, location: str) -> float:
    """How long a file of sound is, as its head says."""
    import soundfile

    with _readable(file, location):
        seconds = float(soundfile.info(_opened(file)).duration)
    if not seconds:
        raise InputError(f"{location}: {file} holds no sound.", "Remove it.")

    return seconds


def _wave(file: MediaFile, rate: int, location: str) -> Any:
    """The mean of a file's channels at a rate."""
    import soundfile
    import soxr

    with _readable(file, location):
        wave, found = soundfile.read(_opened(file), dtype="float32", always_2d=True)
        return soxr.resample(wave.mean(axis=1), found, rate)


def _opened(file: MediaFile) -> Any:
    return file.source() if isinstance(file, Stored) else file


def _readable(file: MediaFile, location: str) -> AbstractContextManager[None]:
    """Raises InputError where a file of sound cannot be read inside."""
    problem = f"{location}: the sound {file} cannot be read"
    remedy = "Repair or remove it; WAV, FLAC, Ogg and MP3 are read."

    return failing_as(problem, remedy, reason=kind_of_error)
