"""Which files of a folder are data: not what systems leave there, and of splits those to train on."""

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
    entries = sorted(entry for entry in folder.iterdir() if not is_litter(Path(entry.name)))
    folders = [entry.name for entry in entries if entry.is_dir()]
    files = [entry for entry in entries if not entry.is_dir() and not _is_media(entry)]
    about = [file for file in files if _ABOUT.fullmatch(file.name)]
    files = [file for file in files if file not in about]
    if not files:
        message = f"the directory {folder} is none that Dataset.save_to_disk wrote, and holds no files of data."
        remedy = "Give a file, or a directory of files of one kind."
        if folders:
            remedy = f"Give a file, or one of its directories: {', '.join(folders[:5])}."
        raise InputError(message, remedy)

    files = _of_train(folder, files, notes)
    other = next((file for file in files if kind_of(file) != kind_of(files[0])), None)
    if other is not None:
        message = (
            f"the directory {folder} holds files of different kinds: {files[0].name} ({kind_of(files[0])}) and "
            f"{other.name} ({kind_of(other)})."
        )
        raise InputError(message, "Give one of them, or a directory of files of one kind.")

    if folders:
        notes.append(f"left out, directories in {folder}: {', '.join(folders[:5])}.")
    if about:
        notes.append(
            f"left out, about the data in {folder}: {', '.join(file.name for file in about[:5])}."
        )
    return files


def _of_train(folder: Path, files: Sequence[Path], notes: list[str]) -> list[Path]:
    """All files, unless their names tell splits apart: then those to train on."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        found = _SPLIT.search(file.name)
        if found is None:
            return list(files)
        name = "train" if found[1].lower().startswith("train") else found[1].lower()
        splits.setdefault(name, []).append(file)

    if len(splits) == 1:
        return list(files)
    if "train" not in splits:
        message = (
            f"the directory {folder} has no files named train, but {', '.join(sorted(splits))}."
        )
        raise InputError(message, "Give the files of one of them.")
    left = pluralize(len(files) - len(splits["train"]), "file")
    names = ", ".join(sorted(splits.keys() - {"train"}))
    notes.append(f"read of {folder}: the files of train; left out: {left} of {names}.")
    return splits["train"]


def _is_media(path: Path) -> bool:
    """Whether a file is of images, sound or film, which rows beside it may name."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    return (
        kind.partition("/")[0] in ("image", "audio", "video") or path.suffix.lower() in _MORE_MEDIA
    )
