"""Small real tokenizers, and files to read with them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = {"unk_token": "[UNK]", "eos_token": "[END]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
FRAME = {"cls_token": "[CLS]", "sep_token": "[SEP]", "bos_token": "[CLS]"}
LETTERS = [*SPECIAL.values(), "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]  # a is 6


def letters(*, framed: bool = False, **changes: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of lower-case letters, a as 6; `framed`: [CLS] (4) and [SEP] (5) around each text, as BERT has."""
    plain = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate(LETTERS)}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if framed:
        plain.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 4), ("[SEP]", 5)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, **{**SPECIAL, **(FRAME if framed else {}), **changes}
    )


def lines(folder: Path, *rows: Any) -> Path:
    """A file of rows as JSON lines."""
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "a.jsonl"
