"""Synthetic images beside text, for models that see: the tokens of one image, then text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError, as_input_error, require
from autofit.models.tasks.images import image_channels, image_sides
from autofit.models.tasks.sizes import YOUR_FUNCTION, Asked, padding, positions, whole_numbers
from autofit.models.tasks.sound import RandomSound
from autofit.models.tasks.text import SEED, random_ids

if TYPE_CHECKING:
    import torch

_SIDE = 448  # pixels of an image, where models take every size
_PATCHES = 2048  # of a page that Pix2Struct reads (arXiv:2210.03347)
# kinds whose forward is told the size of each image
_SIZED = ("mistral3", "lighton_ocr", "mistral_large4")
_SQUARES = ("paddleocr_vl",)  # kinds whose patches are small images, not rows of values
_IN_PARTS = "llava_next"  # a kind that sees an image as a whole and in parts
_FRAMES = {"instructblipvideo": 4}  # of a sample, by kinds that see nothing but videos
# Under which keys configs have the tokens that stand for an image, for other media, and before and
# behind an image.
_IMAGE_TOKEN = ("image_token_id", "image_token_index")
_VIDEO_TOKEN = ("video_token_id", "video_token_index", "audio_token_id")
_TYPES = ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask")
_BEFORE = ("vision_start_token_id", "boi_token_index")
_BEHIND = ("vision_end_token_id", "eoi_token_index")


@dataclass(frozen=True)
class RandomImageText:
    """n -> token ids [n, sequence_length], which begin with an image's, their labels (-100 for the
    image), its pixels, and what else the forward takes.

    Attributes:
        avoided: tokens that mean something else than text.
        before, after: the tokens before and behind an image.
        image_token: -1 where images are no tokens.
        pixels: the shape of one image's; patches of all images are one tensor.
        grid: how many patches each image has, as [time, height, width].
        images: of a sample, where pixels have a dimension for them.
        attended: whether a mask says which token sees which image.
        sizes: height and width, for models that are told the size of each image.
        shapes: rows and columns of its patches, for models that are told those.
        types: arguments that tell an image's tokens from text.
        question: the vocabulary of what reads the text beside the image, too, as InstructBLIP's
            Q-Former.
    """

    sequence_length: int
    vocab_size: int
    avoided: tuple[int, ...]
    before: tuple[int, ...]
    image_token: int
    image_tokens: int
    after: tuple[int, ...]
    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None = None
    images: int = 0
    attended: bool = False
    sizes: tuple[int, int] | None = None
    shapes: tuple[int, int] | None = None
    types: tuple[str, ...] = ()
    question: int = 0

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        ids = random_ids(
            (n, self.sequence_length),
            self.vocab_size - len(self.avoided),
            None,
            generator,
        )
        for token in sorted(self.avoided):
            ids = ids + (ids >= token)

        image = [self.image_token] * self.image_tokens
        head = [*self.before, *image, *self.after]
        ids[:, : len(head)] = torch.tensor(head, device="cpu")
        labels = ids.clone()
        labels[:, : len(head)] = -100

        batch = {"input_ids": ids, "labels": labels}
        for name in self.types:
            batch[name] = (ids == self.image_token).long()
        if self.attended:
            batch["image_attention_mask"] = _ones(*ids.shape, self.images)
        if self.question:
            shape = tuple(ids.shape)
            batch["qformer_input_ids"] = random_ids(shape, self.question, None, generator)
        if self.sizes is not None:
            batch["image_sizes"] = torch.tensor([self.sizes] * n, device="cpu")
        if self.shapes is not None:
            batch["spatial_shapes"] = torch.tensor([self.shapes] * n, device="cpu")
            batch["pixel_attention_mask"] = _ones(n, self.pixels[0])

        shape = (n, *self.pixels)
        if self.grid is not None:
            patches, *values = self.pixels
            shape = (n * patches, *values)
        elif self.images:
            shape = (n, self.images, *self.pixels)
        batch["pixel_values"] = torch.randn(shape, generator=generator, device="cpu")

        if self.grid is not None:
            batch["image_grid_thw"] = torch.tensor([self.grid] * n, device="cpu")
        return batch


def _ones(*shape: int) -> torch.Tensor:
    """A mask that hides nothing."""
    import torch

    return torch.ones(shape, dtype=torch.long, device="cpu")


def _read_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """The labels of a batch, none of which is shifted away."""
    return int((batch["labels"] != -100).sum())


@dataclass(frozen=True)
class RandomReading(RandomSound):
    """n -> an image [n, *shape], and what is read in it.

    `count` is what the loss is a mean over.
    """

    count = staticmethod(_read_tokens)


@dataclass(frozen=True)
class RandomFormulas(RandomReading):
    """n -> an image, what is read in it, and that again, which PP-FormulaNet shifts for its decoder
    by itself."""

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        batch = super().__call__(n)
        return {**batch, "input_ids": batch["labels"].clone()}


@dataclass(frozen=True)
class RandomPages(RandomReading):
    """n -> patches in rows [n, patches, 2 + values of a patch], each behind its row and column, and
    what is read."""

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        batch = super().__call__(n)
        patches = self.shape[0]
        side = math.isqrt(patches)
        numbers = torch.arange(patches, device="cpu")
        pages = batch[self.argument]
        pages[..., 0] = 1 + numbers // side
        pages[..., 1] = 1 + numbers % side
        return batch


def image_text_batches(asked: Asked) -> RandomImageText | RandomReading:
    """The batches of a model of images and text, by its config.

    Raises:
        InputError: its images have a form that is not known here, or the text is too short for one.
    """
    config = asked.config
    arguments = set(asked.arguments)
    text = config.get_text_config()
    vision = getattr(config, "vision_config", None)
    beginning = {"input_ids", "decoder_input_ids"} & arguments
    if beginning == {"decoder_input_ids"} or config.model_type == "pp_formulanet":
        return _read_batches(asked)

    frames = _FRAMES.get(config.model_type, 0)
    keys = list(_IMAGE_TOKEN)
    if frames:
        keys = ["video_token_index"]
    known = whole_numbers(config, *keys)
    # BLIP attends to images apart
    is_beside = not any(hasattr(config, key) for key in keys)
    if vision is None or not (known or is_beside) or "pixel_values" not in arguments:
        message = f"autofit knows no batches of images and text for {asked.name}."
        raise InputError(message, YOUR_FUNCTION)

    token = known[0] if known else None
    channels = image_channels(asked, vision)
    sizes: tuple[int, int] | None = None
    pixels: tuple[int, ...]
    grid: tuple[int, int, int] | None = None
    shapes: tuple[int, int] | None = None
    images = frames
    if "image_grid_thw" in arguments:
        pixels, grid, tokens = _patches(asked, vision, channels)
        if config.model_type in _SQUARES:
            size = asked.size(vision, "patch_size")
            pixels = (pixels[0], channels, size, size)
    elif "spatial_shapes" in arguments:
        merge = asked.size(config, "downsample_factor")
        pixels, (_, rows, columns), tokens = _patches(asked, vision, channels, merge)
        shapes = (rows, columns)
    elif config.model_type == _IN_PARTS:
        pixels = (channels, *image_sides(asked, vision))
        sizes, parts, tokens = _parts(asked, vision)
        images = frames or parts
    else:
        height, width = image_sides(asked, vision)
        if config.model_type in _SIZED:  # up to those of the config
            height = min(height, _SIDE)
            width = min(width, _SIDE)
            sizes = (height, width)

        pixels = (channels, height, width)
        tokens = 0
        if known:
            tokens = _counted_tokens(asked, vision, pixels) * max(1, frames)

    vocabulary = asked.size(text, "vocab_size")
    # Kosmos-2 is told where an image is, whatever its tokens are
    if "image_embeds_position_mask" in arguments:
        token = vocabulary - 1
        tokens = asked.size(config, "latent_query_num")

    before = whole_numbers(config, *_BEFORE)
    after = whole_numbers(config, *_BEHIND)
    length = asked.length(positions(text))
    shortest = len(before) + tokens + len(after) + 2
    if length < shortest:
        message = f"an image of {asked.name} takes {tokens} tokens"
        message += f", and the sequence length is {length}."
        raise InputError(message, f"Give at least {shortest}.")

    rule = f"the image token of {asked.name} must be from 0 to below vocab_size {vocabulary}"
    require(token is None or 0 <= token < vocabulary, rule, token)

    has_dimension = not arguments.isdisjoint({"pixel_attention_mask", "image_attention_mask"})
    if not images and shapes is None and has_dimension:
        images = 1

    question = 0
    if "qformer_input_ids" in arguments:
        question = asked.size(config.qformer_config, "vocab_size")

    special = whole_numbers(config, *_IMAGE_TOKEN, *_VIDEO_TOKEN, *_BEFORE, *_BEHIND)
    special += [number for number in (padding(text), token) if number is not None]
    avoided = {number for number in special if 0 <= number < vocabulary}
    return RandomImageText(
        sequence_length=length,
        vocab_size=vocabulary,
        avoided=tuple(sorted(avoided)),
        before=tuple(before),
        image_token=-1 if token is None else token,
        image_tokens=tokens,
        after=tuple(after),
        pixels=pixels,
        grid=grid,
        images=images,
        attended="image_attention_mask" in arguments,
        sizes=sizes,
        shapes=shapes,
        types=tuple(name for name in _TYPES if name in arguments),
        question=question,
    )


def _read_batches(asked: Asked) -> RandomReading:
    """The batches of an encoder of images and a decoder of what is in them, as TrOCR, Donut or
    Pix2Struct."""
    config = asked.config
    vision = getattr(config, "encoder", None) or getattr(config, "vision_config", config)
    text = getattr(config, "decoder", None) or config.get_text_config(decoder=True)
    vocabulary = asked.size(text, "vocab_size")
    length = asked.length(positions(text))

    kind = RandomReading
    argument = "pixel_values"
    if "flattened_patches" in asked.arguments:
        kind = RandomPages
        argument = "flattened_patches"
        shape: tuple[int, ...] = (_PATCHES, 2 + asked.size(vision, "patch_embed_hidden_size"))
    else:
        if config.model_type == "pp_formulanet":
            kind = RandomFormulas
        shape = (image_channels(asked, vision), *image_sides(asked, vision))

    return kind(
        argument,
        shape,
        tokens=length,
        vocab_size=vocabulary,
        pad_token_id=padding(text, vocabulary),
        sequence_length=length,
    )


def _patches(
    asked: Asked,
    vision: Any,
    channels: int,
    merge: int | None = None,
) -> tuple[tuple[int, int], tuple[int, int, int], int]:
    """[patches, values of a patch] of one image, its grid, and its tokens: Qwen's way, of which
    many are.

    Args:
        merge: how many patches of a row make one token; None: as the config of what sees says.
    """
    size = asked.size(vision, "patch_size")
    if merge is None:
        merge = asked.size(vision, "spatial_merge_size", default=2)

    tokens_of_side = max(1, _SIDE // size // merge)
    side = tokens_of_side * merge
    frames = asked.size(vision, "temporal_patch_size", default=1)
    values = channels * frames * size * size
    return (side * side, values), (1, side, side), tokens_of_side**2


def _parts(asked: Asked, vision: Any) -> tuple[tuple[int, int], int, int]:
    """The height and width of an image, the parts that LLaVA 1.6 sees of it, and its tokens.

    Each part is as large as what LLaVA 1.5 sees: all of the image once, and its four quarters. Each
    row of these has a token more.
    """
    size = asked.size(vision, "image_size")
    whole = (2 * size, 2 * size)
    if whole not in map(tuple, asked.config.image_grid_pinpoints):
        message = f"{asked.name} takes no images of {whole[0]} x {whole[1]} pixels."
        raise InputError(message, YOUR_FUNCTION)

    side = size // asked.size(vision, "patch_size")
    rows = 2 * side
    return whole, 5, side * side + rows * (rows + 1)


def _counted_tokens(asked: Asked, vision: Any, pixels: tuple[int, ...]) -> int:
    """The tokens that the model makes of one image.

    Its patches, those of a square merged into one where the config says so; else the model is
    asked, on the meta device, where nothing is computed.

    Raises:
        InputError: the model cannot be made, or gives no features of images.
    """
    import torch
    import transformers

    config = asked.config
    queries = getattr(config, "num_query_tokens", None)  # BLIP-2's
    if isinstance(queries, int):
        return queries

    patch = getattr(vision, "patch_size", None)
    merged = getattr(config, "scale_factor", None) or getattr(config, "spatial_merge_size", None)
    if isinstance(patch, int) and isinstance(merged, int):
        _, height, width = pixels
        return (height // patch // merged) * (width // patch // merged)

    with as_input_error(
        lambda error: f"autofit knows no batches of images and text for {asked.name}.",
        YOUR_FUNCTION,
    ):
        kind = transformers.AutoModelForImageTextToText
        with torch.device("meta"), torch.no_grad():
            model = kind.from_config(config, dtype=torch.float32)
            features = model.get_image_features(pixel_values=torch.empty((1, *pixels)))

        tensors = getattr(features, "pooler_output", features)
        if tensors is None:
            tensors = features.last_hidden_state
        if not isinstance(tensors, list | tuple):
            tensors = [tensors]
        return sum(math.prod(part.shape[:-1]) for part in tensors)
