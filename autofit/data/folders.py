"""Which files of a folder are data: not what systems leave there, and of splits the one to train
on."""

import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path

from autofit.core.errors import InputError, pluralize
from autofit.data.contents import inner_name

SAVED = ("state.json", "dataset_dict.json")  # one of them lies in what save_to_disk wrote
_LITTER = {  # in lower case
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx"),  # of Windows and macOS
    *("_success", "_metadata", "_common_metadata"),  # of Spark and the like
}
_ABOUT = re.compile(
    r"(readme|license|licence|dataset_infos?|dataset_card|checksums?)\b.*",
    re.IGNORECASE,
)
_SPLIT = re.compile(
    r"(?<![a-z])(train|training|test|testing|validation|valid|val|dev|eval)(?![a-z])",
    re.IGNORECASE,
)
_MORE_MEDIA = (".webp", ".flac", ".opus")  # which Python's table of types does not have
_KINDS = {  # suffixes by what such files hold
    ".json": "JSON",
    ".jsonl": "JSON",
    ".ndjson": "JSON",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
}


def kind_of(path: Path) -> str:
    """What a file's name says that it holds."""
    return _KINDS.get(inner_name(path).suffix.lower(), "text")


def is_litter(path: Path) -> bool:
    """Whether a relative path is hidden, or what an operating system leaves in folders."""
    return any(part.startswith(".") or part.lower() in _LITTER for part in path.parts)


def shards(folder: Path, notes: list[str]) -> list[Path]:
    """The data files of a folder that make one data set, sorted by name."""
    folders = []
    about = []
    files = []
    for entry in sorted(folder.iterdir()):
        if is_litter(Path(entry.name)):
            continue
        if entry.is_dir():
            folders.append(entry.name)
        elif _is_media(entry):
            continue
        elif _ABOUT.fullmatch(entry.name):
            about.append(entry.name)
        else:
            files.append(entry)

    first_folders = ", ".join(folders[:5])
    if not files:
        message = (
            f"the directory {folder} is none that Dataset.save_to_disk wrote, and holds no files "
            "of data."
        )
        remedy = "Give a file, or a directory of files of one kind."
        if folders:
            remedy = f"Give a file, or one of its directories: {first_folders}."
        raise InputError(message, remedy)

    files = _of_train(folder, files, notes)
    kind = kind_of(files[0])
    for file in files:
        if kind_of(file) != kind:
            message = (
                f"the directory {folder} holds files of different kinds: "
                f"{files[0].name} ({kind}) and {file.name} ({kind_of(file)})."
            )
            raise InputError(message, "Give one of them, or a directory of files of one kind.")

    if folders:
        notes.append(f"left out, directories in {folder}: {first_folders}.")
    if about:
        notes.append(f"left out, about the data in {folder}: {', '.join(about[:5])}.")

    return files


def _of_train(folder: Path, files: Sequence[Path], notes: list[str]) -> list[Path]:
    """All files, unless their names tell splits apart: then those to train on."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        found = _SPLIT.search(file.name)
        if found is None:
            return list(files)

        name = found[1].lower()
        if name == "training":
            name = "train"
        splits.setdefault(name, []).append(file)

    if len(splits) == 1:
        return list(files)

    of_train = splits.pop("train", None)
    names = ", ".join(sorted(splits))
    if of_train is None:
        message = f"the directory {folder} has no files named train, but {names}."
        raise InputError(message, "Give the files of one of them.")

    left = pluralize(len(files) - len(of_train), "file")
    notes.append(f"read of {folder}: the files of train; left out: {left} of {names}.")
    return of_train


def _is_media(path: Path) -> bool:
    """Whether a file is of images, sound or film, which rows beside it may name."""
    kind, _ = mimetypes.guess_type(path.name)
    if kind is not None and kind.startswith(("image/", "audio/", "video/")):
        return True

    return path.suffix.lower() in _MORE_MEDIA
