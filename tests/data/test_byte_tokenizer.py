"""The bytes of a text are its token ids, in a tokenizer that transformers loads as any other."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from autofit.data.byte_tokenizer import CHAT_TEMPLATE, byte_ids, byte_tokenizer, is_byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer after it was saved beside a model."""
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(st.text())
def test_every_text_is_its_bytes(text: str) -> None:
    ids = list(text.encode())
    assert (
        TOKENIZER(text)["input_ids"]
        == TOKENIZER(text, add_special_tokens=False)["input_ids"]
        == ids
    )
    assert byte_ids(text).tolist() == ids
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", ["", "<0x00>a<0x01>", "\x00\x01", "äb 日本 🙂\r\n", "<0x", "ā Ā"])
def test_saved_and_loaded_it_is_the_same(loaded: Any, text: str) -> None:
    assert loaded(text)["input_ids"] == list(text.encode())


def test_what_it_has_and_has_not(loaded: Any) -> None:
    for tokenizer in (TOKENIZER, loaded):
        assert is_byte_tokenizer(tokenizer)
        assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id) == (256, 0, 1)
        assert tokenizer.eos_token_id is tokenizer.bos_token_id is tokenizer.chat_template is None


def test_others_are_not_taken_for_it() -> None:
    more = byte_tokenizer()
    more.add_tokens(["word"])
    assert not is_byte_tokenizer(more)


def test_the_chat_template_writes_turns_and_asks_for_the_next(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    turns = [{"role": "user", "content": "Hi ä"}, {"role": "assistant", "content": "Yes"}]
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        text = each.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert text == "user:\nHi ä\x03\nassistant:\nYes\x03\nassistant:\n"
