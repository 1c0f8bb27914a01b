"""`autofit train` on sound, through the feature extractors of the models themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerBase,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from autofit.core.errors import InputError
from tests.api.trained_files import Run
from tests.data import sounds
from tests.data.letters import LETTERS, letters

WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 40,
    "num_mel_bins": 8,
    "d_model": 32,
    "max_source_positions": 50,
    "max_target_positions": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
WAV2VEC2 = {
    "model_type": "wav2vec2",
    "vocab_size": 40,
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
    "conv_dim": [16, 16],
    "conv_stride": [10, 8],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 32,
    **dict.fromkeys(
        (
            "mask_time_prob",
            "hidden_dropout",
            "attention_dropout",
            "activation_dropout",
            "layerdrop",
        ),
        0.0,
    ),
    **dict.fromkeys(("feat_proj_dropout", "final_dropout"), 0.0),
}
CTC = {**WAV2VEC2, "architectures": ["Wav2Vec2ForCTC"]}
CLASSES = {
    "id2label": {"0": "low", "1": "high"},
    "architectures": ["Wav2Vec2ForSequenceClassification"],
}


def tones(run: Run, **fields: Any) -> Path:
    """Four tones of their own lengths, and what is said in each."""
    rows = []
    for number, text in enumerate(("ab", "cd", "abc", "d")):
        sounds.tone(
            run.folder / f"{number}.wav",
            200 * (number + 1),
            seconds=0.1 + 0.05 * number,
            rate=8_000,
        )
        rows.append({"audio": f"{number}.wav", **(fields or {"text": text})})
    return run.data(*rows)


def whisper(folder: Path) -> Run:
    run = Run(folder, "speech-seq2seq", WHISPER, length=16)
    letters().save_pretrained(run.model)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(run.model)
    return run


def wav2vec2(folder: Path) -> Run:
    run = Run(folder, "ctc", CTC, length=None)
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(LETTERS)})
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "word_delimiter_token": "z"}
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), **names).save_pretrained(run.model)
    Wav2Vec2FeatureExtractor().save_pretrained(run.model)
    return run


@pytest.mark.parametrize("make", [whisper, wav2vec2])
def test_two_real_steps(tmp_path: Path, make: Any) -> None:
    run = make(tmp_path)
    data = tones(run)
    split = run.losses(data, steps=2, eval_data=data, lr=1e-3)
    run.content["config"] = {}
    whole = run.losses(data, steps=2, lr=1e-3)
    assert whole == pytest.approx(split, rel=1e-3)
    assert split[1] < split[0]

    sounds.tone(tmp_path / "0.wav", 3000)
    # what is heard matters, or it is the same to the bit
    assert run.losses(data, steps=1, lr=1e-3)[0] != whole[0]


def test_classes_of_sound(tmp_path: Path) -> None:
    run = Run(tmp_path, "audio-classification", {**WAV2VEC2, **CLASSES}, length=None)
    Wav2Vec2FeatureExtractor().save_pretrained(run.model)
    trained = run.train(tones(run, label="low"), epochs=15, output=tmp_path / "out")
    assert trained.history[-1].loss < 0.5 * trained.history[0].loss
    assert (
        run.losses(tones(run, label="high"), steps=1, weights=tmp_path / "out" / "model")[0] > 0.7
    )


def test_a_processor_that_was_saved_whole(tmp_path: Path) -> None:
    run = wav2vec2(tmp_path)
    processor = AutoProcessor.from_pretrained(run.model)
    assert isinstance(processor.tokenizer, PreTrainedTokenizerBase)
    (run.model / "preprocessor_config.json").unlink()
    processor.save_pretrained(run.model)
    assert run.losses(tones(run), steps=1, output=tmp_path / "out")
    assert (
        AutoProcessor.from_pretrained(tmp_path / "out" / "model").feature_extractor.sampling_rate
        == 16_000
    )


def test_a_model_without_a_feature_extractor(tmp_path: Path) -> None:
    run = whisper(tmp_path)
    (run.model / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="its own processor makes of a file, and none is there"):
        run.train(tones(run), steps=1)
