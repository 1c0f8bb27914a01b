"""The files of a folder that are data: of one kind, those to train on, and not what systems leave there."""

from pathlib import Path

import pytest

from autofit.core.errors import InputError
from autofit.data.folders import is_litter, kind_of, shards

LITTER = ("Thumbs.db", ".DS_Store", "desktop.ini", ".hidden", "._a.jsonl", "_SUCCESS")


def found(folder: Path, *names: str) -> tuple[list[str], list[str]]:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"a")
    notes: list[str] = []
    return [file.name for file in shards(folder, notes)], notes


def test_files_are_sorted_and_litter_is_left_out(tmp_path: Path) -> None:
    assert found(tmp_path, "b.jsonl", "a.json.gz", *LITTER) == (["a.json.gz", "b.jsonl"], [])


def test_a_link_to_nothing_is_no_reason_to_train_on_the_rest(tmp_path: Path) -> None:
    (tmp_path / "b.csv").symlink_to(tmp_path / "nowhere")
    assert found(tmp_path, "a.csv")[0] == ["a.csv", "b.csv"]


def test_images_are_what_rows_name(tmp_path: Path) -> None:
    assert found(tmp_path, "metadata.csv", "a.png", "b.webp", "c.wav") == (["metadata.csv"], [])


def test_what_is_about_the_data_and_directories_are_left_out_and_told(tmp_path: Path) -> None:
    files, notes = found(tmp_path, "a.csv", "README.md", "LICENSE", "more/b.csv")
    assert files == ["a.csv"]
    assert notes == [
        f"left out, directories in {tmp_path}: more.",
        f"left out, about the data in {tmp_path}: LICENSE, README.md.",
    ]


def test_of_several_splits_that_of_train(tmp_path: Path) -> None:
    files, notes = found(
        tmp_path, "train-1.jsonl", "x_train_0.jsonl", "test.jsonl", "validation.jsonl"
    )
    assert files == ["train-1.jsonl", "x_train_0.jsonl"]
    assert notes == [
        f"read of {tmp_path}: the files of train; left out: 2 files of test, validation."
    ]


def test_one_split_is_all_there_is_and_other_names_are_none(tmp_path: Path) -> None:
    assert found(tmp_path, "test-1.csv", "test-2.csv")[0] == ["test-1.csv", "test-2.csv"]
    assert len(found(tmp_path, "contest.csv")[0]) == 3


def test_folders_that_make_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"holds no files of data\. Give a file, or a directory of files of one kind",
    ):
        found(tmp_path)
    with pytest.raises(
        InputError,
        match=r"holds no files of data\. Give a file, or one of its directories: inner\.",
    ):
        found(tmp_path, "inner/a.csv")
    with pytest.raises(InputError, match=r"no files named train, but test, val\."):
        found(tmp_path, "test.csv", "val.csv")
    with pytest.raises(
        InputError, match=r"files of different kinds: a\.txt \(text\) and test\.csv \(CSV\)"
    ):
        found(tmp_path, "a.txt")


@pytest.mark.parametrize(
    ("name", "kind"), [("a.NDJSON.xz", "JSON"), ("a.tsv", "TSV"), ("a", "text"), ("a.gz", "text")]
)
def test_what_names_say(name: str, kind: str) -> None:
    assert kind_of(Path(name)) == kind


def test_litter() -> None:
    assert all(is_litter(Path("a", name)) for name in LITTER)
    assert is_litter(Path("__MACOSX/a.png"))
    assert not is_litter(Path("a/thumbs.png"))
