"""Tokenizers, processors and images for models that see, made here: nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm as smol
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

QWEN = (  # ids from 256
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


needs_smol = pytest.mark.skipif(
    type(transformers.SmolVLMImageProcessorPil) is not type,
    reason="this version of transformers loads SmolVLM's image processor with torchvision only",
)


def bytes_and(special: tuple[str, ...], **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes (256 ids), and of special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer, plain.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    plain.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=plain, **options)


def save_qwen(folder: Path) -> None:
    """Leave a processor of Qwen's in a folder: an image takes 1 token for 56 x 56 pixels, and 4 at most."""
    tokenizer = bytes_and(QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    Qwen2VLImageProcessorPil(patch_size=28, size=size).save_pretrained(folder)


def save_gemma(folder: Path) -> None:
    """Leave a processor of Gemma 3's in a folder: an image takes 4 tokens between two."""
    marks = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    special = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", *marks.values())
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer = bytes_and(special, **named, extra_special_tokens=marks)
    template = (
        "{{ bos_token }}{% for message in messages %}"
        "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
        "{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}"
        "{% endfor %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4).save_pretrained(
        folder
    )


def save_smol(folder: Path) -> None:
    """Leave a processor of SmolVLM's in a folder: an image takes 4 tokens, and 4 more for each part it is split in."""
    special = (
        "<|im_start|>",
        "<end_of_utterance>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
    )
    tokenizer = bytes_and(
        special, bos_token="<|im_start|>", eos_token="<end_of_utterance>", pad_token="<|im_start|>"
    )
    tokenizer.chat_template = smol.DEFAULT_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    SmolVLMImageProcessorPil(**sizes).save_pretrained(folder)
    settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))


def draw(file: Path, colour: str, size: tuple[int, int] = (60, 60)) -> Path:
    """An image of a disc."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((4, 4, size[1] - 4, size[1] - 4), fill=colour)
    image.save(file)
    return file
