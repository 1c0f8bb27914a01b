"""A tokenizer of bytes for models that have none at hand, and a chat template for tokenizers
without one.

It is a transformers tokenizer, so `AutoTokenizer.from_pretrained` loads what was trained with it.
"""

from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

_VOCABULARY = {f"<0x{byte:02X}>": byte for byte in range(256)}
# Bytes that no text has.
_PAD = "<0x00>"
_MASK = "<0x01>"

# Each turn is "role:", a line break, its content, and the tokenizer's end of text (for bytes 3,
# which is that of ASCII). Assistant turns are marked as generated from their content to the end.
CHAT_TEMPLATE = (
    "{% set end = eos_token or '\\x03' %}"
    "{% for message in messages %}"
    "{{ message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + end }}{% endgeneration %}"
    "{% else %}{{ message['content'] + end }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 tokens, byte b with id b, without an end of text; 0 pads and 1 masks."""
    # Without merges, every character falls back to its bytes.
    model = models.BPE(_VOCABULARY, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        mask_token=_MASK,
        split_special_tokens=True,  # a text that spells "<0x00>" is six characters, not padding
    )


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether a tokenizer is this one, also after it was saved and loaded."""
    return len(tokenizer) == len(_VOCABULARY) and tokenizer.get_vocab() == _VOCABULARY


def byte_ids(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The byte tokenizer's ids of a text, which itself takes 1.3 s and 150 MB for each MB."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
