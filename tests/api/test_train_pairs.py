"""`autofit train` on pairs of texts, of which T5 and BART write the second and BERT unites both; and on words."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from autofit.core.errors import InputError
from tests.api.trained_files import Run
from tests.data.letters import letters

T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 40,
    **dict.fromkeys(("d_model", "d_ff"), 32),
    **dict.fromkeys(("d_kv", "num_layers", "num_heads"), 2),
    "dropout_rate": 0.0,
}
BART = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "vocab_size": 40,
    "max_position_embeddings": 16,
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
        2,
    ),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
}
PAIRS = [
    {"text": letter * length, "summary": letter}
    for length, letter in enumerate("abcdefgh", start=1)
]


@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_summaries_are_learnt(tmp_path: Path, config: dict[str, Any]) -> None:
    run = Run(tmp_path, "seq2seq", config, length=16)
    letters().save_pretrained(run.model)
    seen = run.losses(run.data(*PAIRS), epochs=15)
    assert seen[-1] < 0.7 * seen[0]


def test_the_split_loss_is_that_of_whole_batches(tmp_path: Path) -> None:
    run = Run(tmp_path, "seq2seq", T5, length=16)
    letters().save_pretrained(run.model)
    data = run.data(*PAIRS)
    split = run.losses(data, steps=4)
    run.content["config"] = {}
    assert run.losses(data, steps=4) == pytest.approx(split, rel=1e-4)


def test_what_was_trained_is_loaded_and_evaluated(tmp_path: Path) -> None:
    run = Run(tmp_path, "seq2seq", T5, length=16)
    letters().save_pretrained(run.model)
    data = run.data(*PAIRS)
    trained = run.train(data, steps=1, eval_data=data, output=tmp_path / "out")
    assert len(trained.evaluations) == 1
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    inputs = tokenizer("abc", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**inputs, max_new_tokens=2).shape[0] == 1


BERT = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
BERT |= {"vocab_size": 40, **dict.fromkeys(("hidden_size", "intermediate_size"), 32)}


def test_embeddings(tmp_path: Path) -> None:
    # without dropout, whose draws would be others in micro-batches
    config = {**BERT, **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)}
    run = Run(tmp_path, "embed", {**config, "architectures": ["BertModel"]}, length=16)
    run.content["config"] = {}
    letters(framed=True).save_pretrained(run.model)
    rows = [
        {"anchor": letter * length, "positive": letter}
        for length, letter in enumerate("abcdefgh", start=1)
    ]
    data = run.data(*rows)
    trained = run.train(data, epochs=15, lr=1e-3, eval_data=data)
    assert trained.history[-1].loss < 0.5 * trained.history[0].loss
    assert trained.evaluations[-1] < trained.evaluations[0]
    whole = [report.loss for report in trained.history[:3]]
    run.content["config"] = {"micro_batch_size": 2}
    # each pair is told from all others of its batch, also in micro-batches
    split = run.train(data, epochs=3, lr=1e-3)
    assert [report.loss for report in split.history[:3]] == pytest.approx(whole, rel=1e-4)


def test_passages_are_scored(tmp_path: Path) -> None:
    run = Run(tmp_path, "rerank", {**BERT, "architectures": ["BertModel"]}, length=16)
    letters(framed=True).save_pretrained(run.model)
    rows = [
        {"query": letter * 2, "passage": answer * 3, "label": float(answer == letter)}
        for letter in "abcd"
        for answer in (letter, "z")
    ]
    seen = run.losses(run.data(*rows), epochs=25, lr=2e-3)
    assert sum(seen[-4:]) < 0.8 * sum(seen[:4])
    with pytest.raises(InputError, match="a label must be a number, not 'yes'"):
        run.train(run.data({"query": "a", "passage": "b", "label": "yes"}), steps=1)


def test_tags_of_words(tmp_path: Path) -> None:
    config = {
        **BERT,
        "architectures": ["BertForTokenClassification"],
        "id2label": {"0": "x", "1": "y"},
    }
    run = Run(tmp_path, "token-classification", config, length=16)
    letters(framed=True).save_pretrained(run.model)
    rows = [{"tokens": ["ab", letter], "tags": ["O", "B"]} for letter in "cdefghij"]
    trained = run.train(run.data(*rows), epochs=10, output=tmp_path / "out")
    assert trained.history[-1].loss < 0.3 * trained.history[0].loss
    assert trained.model.config.id2label == {0: "B", 1: "O"}


def test_answers_within_texts(tmp_path: Path) -> None:
    config = {**BERT, "architectures": ["BertForQuestionAnswering"]}
    run = Run(tmp_path, "question-answering", config, length=16)
    letters(framed=True).save_pretrained(run.model)
    rows = [
        {"question": "a", "context": "bcdef", "answers": {"text": [x], "answer_start": [n]}}
        for n, x in enumerate("bcde")
    ]
    data = run.data(*rows)
    trained = run.train(data, steps=20, lr=1e-3, eval_data=data)
    assert trained.evaluations[-1] < 0.9 * trained.history[0].loss
