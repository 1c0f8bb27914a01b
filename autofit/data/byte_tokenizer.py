"""The tokenizer of a model that has none at hand: the bytes of the text are its token ids.

A tokenizer of transformers like any other, so that what was trained with it can be saved, loaded by
`AutoTokenizer.from_pretrained` and asked again. Beside it the chat template for tokenizers that come without one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

_VOCABULARY = {f"<0x{byte:02X}>": byte for byte in range(256)}
_PAD, _MASK = "<0x00>", "<0x01>"  # bytes that no text has

# Each turn is "role:", a line break, what was said, and the tokenizer's end of text (for bytes 3, the end of text of
# ASCII). Of assistant turns all from what was said to the end is marked as generated.
CHAT_TEMPLATE = (
    "{% set end = eos_token or '\\x03' %}"
    "{% for message in messages %}"
    "{{ message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + end }}{% endgeneration %}"
    "{% else %}{{ message['content'] + end }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 tokens, byte b with id b, without an end of text; 0 pads and 1 masks."""
    model = models.BPE(_VOCABULARY, [], byte_fallback=True)  # no merges: every character falls back to its bytes
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # split_special_tokens: a text that spells "<0x00>" is six characters, not padding.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, mask_token=_MASK, split_special_tokens=True
    )


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether a tokenizer is the one of this file, also after it was saved and loaded."""
    return len(tokenizer) == len(_VOCABULARY) and tokenizer.get_vocab() == _VOCABULARY


def byte_ids(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """What the byte tokenizer makes of a text, without the 1.3 s and 150 MB that it takes for each MB."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
