"""Tokenizers, processors and images for models that see, made here: nothing is downloaded."""

from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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


def bytes_and(special: tuple[str, ...], **options: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes (256 ids), and of special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    plain.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=plain, **options)


def save_qwen(folder: Path) -> None:
    """Leave a processor of Qwen's in a folder: an image takes 1 token for 56 x 56 pixels, and 4 at most."""
    tokenizer = bytes_and(QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    Qwen2VLImageProcessorPil(patch_size=28, size=size).save_pretrained(folder)


def draw(file: Path, colour: str, size: tuple[int, int] = (60, 60)) -> Path:
    """An image of a disc."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((4, 4, size[1] - 4, size[1] - 4), fill=colour)
    image.save(file)
    return file
