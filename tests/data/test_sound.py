"""Rows of sound become batches of the model's own feature extractor, resampled to the rate that it wants."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.data.file_loader import file_loader
from autofit.data.options import DataOptions
from autofit.data.processors import Processing
from autofit.data.samples import FileLoader
from autofit.models.tasks.sound import RandomSound
from tests.data import sounds
from tests.data.letters import letters, lines

WAVES = Wav2Vec2FeatureExtractor(do_normalize=False)
SPECTRA = WhisperFeatureExtractor(feature_size=8, chunk_length=1)


def loader(
    path: Path, *, task: str = "ctc", extractor: Any = WAVES, measured: int = 160_000, **given: Any
) -> FileLoader:
    synthetic = RandomSound("input_values", (measured,))
    workload = Workload(
        model=torch.nn.Identity,
        batch=synthetic,
        task=task,
        sequence_length=6,
        effective_batch_size=2,
    )
    arguments = frozenset({"input_values", "input_features"})
    processing = Processing(extractor, arguments, **given)
    return file_loader(
        workload, path, tokenizer=letters(), options=DataOptions(), processing=processing
    )


def whole(path: Path, **given: Any) -> dict[str, torch.Tensor]:
    found = loader(path, **given).samples
    return found.batch(torch.arange(len(found)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sounds.tone(tmp_path / "low.wav", 100)
    sounds.tone(tmp_path / "high.wav", 1000, seconds=0.3)
    return tmp_path


@pytest.mark.parametrize(
    ("audio", "said"), [("audio", "text"), ("file_name", "transcription"), ("audio", "sentence")]
)
def test_what_is_said(folder: Path, audio: str, said: str) -> None:
    batch = whole(lines(folder, {audio: "low.wav", said: "abc"}, {audio: "high.wav", said: "d"}))
    assert batch["labels"].tolist() == [[6, 7, 8], [9, -100, -100]]
    assert batch["input_values"].shape == (2, 4800)  # 0.3 s
    assert bool((batch["input_values"][0, 3200:] == 0).all())


def test_classes(folder: Path) -> None:
    found = loader(
        lines(folder, {"audio": "low.wav", "label": "low"}, {"audio": "high.wav", "label": "high"}),
        task="audio-classification",
    )
    assert found.samples.batch(torch.arange(2))["labels"].tolist() == [1, 0]
    assert found.label_names == {"high": 0, "low": 1}


def test_a_saved_data_set_of_sound(folder: Path) -> None:
    data = datasets.Dataset.from_dict({"audio": [str(folder / "low.wav")], "text": ["abc"]})
    data = data.cast_column("audio", datasets.Audio(decode=False))
    data.map(
        lambda row: {"audio": {"bytes": Path(row["audio"]["path"]).read_bytes(), "path": None}}
    ).cast_column("audio", datasets.Audio()).save_to_disk(str(folder / "saved"))
    batch = whole(folder / "saved")
    assert batch["input_values"].shape == (1, 3200)
    assert batch["labels"].tolist() == [[6, 7, 8]]


def test_sound_is_resampled_and_its_channels_are_mixed(folder: Path) -> None:
    sounds.tone(folder / "wide.wav", 100, rate=48_000, channels=2)
    path = lines(folder, {"audio": "low.wav", "text": "a"}, {"audio": "wide.wav", "text": "a"})
    low, wide = whole(path)["input_values"]
    assert torch.allclose(low[100:-100], wide[100:-100], atol=0.01)


def test_spectrograms_have_the_length_of_their_extractor(folder: Path) -> None:
    sounds.tone(folder / "long.wav", 100, seconds=1.5)
    path = lines(folder, {"audio": "low.wav", "text": "a"}, {"audio": "long.wav", "text": "a"})
    found = loader(path, task="speech-seq2seq", extractor=SPECTRA)
    assert found.samples.batch(torch.arange(2))["input_features"].shape == (2, 8, 100)
    assert found.notes == ("cut to 1 s of sound: 1 of 2 samples.",)


def test_transcripts_without_the_token_that_the_model_begins_with(folder: Path) -> None:
    path = lines(folder, {"audio": "low.wav", "text": "abc"})
    assert whole(path, task="speech-seq2seq", start=6)["labels"].tolist() == [[7, 8]]


def test_what_is_lost_is_told(folder: Path) -> None:
    path = lines(
        folder, {"audio": "low.wav", "text": "abcdefgh"}, {"audio": "low.wav", "text": "?a"}
    )
    found = loader(path, task="speech-seq2seq")
    assert found.notes == (
        "with characters that the tokenizer does not know: 1 of 2 samples.",
        "cut to 6 tokens: 1 of 2 samples.",
    )
    assert [len(row) for row in found.samples.batch(torch.arange(2))["labels"]] == [6, 6]


def test_sound_too_short_for_what_is_said_is_left_out(folder: Path) -> None:
    path = lines(folder, {"audio": "low.wav", "text": "abb"}, {"audio": "high.wav", "text": "abb"})
    # three outputs in 0.2 s, and a blank between equal labels
    found = loader(path, samples_a_label=900)
    assert found.notes == ("left out, too short for what is said in them: 1 of 2 samples.",)
    assert found.samples.batch(torch.arange(1))["input_values"].shape == (1, 4800)
    with pytest.raises(
        InputError, match="no sound is long enough for what is said in it, in 2 samples"
    ):
        loader(path, samples_a_label=4000)


def test_sound_longer_than_what_was_measured_is_told(folder: Path) -> None:
    path = lines(folder, {"audio": "low.wav", "text": "a"}, {"audio": "high.wav", "text": "a"})
    note = "sound is up to 0.3 s long, and that of a search 0.25 s: training may need more memory, and more time, "
    assert loader(path, measured=4000).notes == (f"{note}than was measured.",)
    assert loader(path, measured=4800).notes == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a"}, "line 1 lacks audio or file_name"),
        ({"audio": "none.wav", "text": "a"}, r"line 1: the sound .*none\.wav is not there"),
        (
            {"audio": "a.jsonl", "text": "a"},
            r"line 1: the sound .*a\.jsonl cannot be read: LibsndfileError",
        ),
        ({"audio": "empty.wav", "text": "a"}, r"line 1: .*empty\.wav holds no sound"),
        (
            {"audio": {"array": [0.0]}, "text": "a"},
            "line 1: the sound must be named by its file, not {'array'",
        ),
    ],
)
def test_wrong_rows(folder: Path, row: Any, words: str) -> None:
    sounds.tone(folder / "empty.wav", 100, seconds=0)
    with pytest.raises(InputError, match=words):
        loader(lines(folder, row))


def test_without_the_packages_that_read_sound(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "soxr" else find(name)
    )
    with pytest.raises(InputError, match="soxr reads, and it is not installed") as error:
        loader(lines(folder, {"audio": "low.wav", "text": "a"}))
    assert "pip install soundfile soxr" in error.value.remedy
