"""Synthetic sound: waves or spectrograms, and what is said in them; all as the factories of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError
from autofit.models.tasks.sizes import YOUR_FUNCTION, Asked, padding, whole_numbers
from autofit.models.tasks.text import SEED, ClassLabels, class_labels, random_ids

if TYPE_CHECKING:
    import torch

SAMPLING_RATE = 16_000  # Hz, of all the models of speech
_SECONDS = 10  # of a sample, where the model does not set them
_FRAME_SECONDS = 0.01  # between the frames of a spectrogram
_TOKENS_A_SECOND = (
    8  # fewer than the 12.5 outputs of the slowest encoders, so that every CTC loss is finite
)
_MOST_TOKENS = ("max_target_positions", "max_text_positions", "max_position_embeddings")
_USUAL_TOKENS = 448  # Whisper's most


@dataclass(frozen=True)
class RandomSound:
    """n -> normally distributed sound [n, *shape], and as labels its class [n] or the tokens said in it [n, tokens]."""

    argument: str  # of the forward: input_values for waves, input_features for spectrograms
    shape: tuple[int, ...]
    classes: ClassLabels | None = None
    tokens: int = 0
    vocab_size: int = 0
    pad_token_id: int | None = None
    sequence_length: int | None = None  # the tokens, where they are what is asked for
    masked: bool = False  # whether the forward counts the frames in a mask

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        sound = torch.randn((n, *self.shape), generator=generator, device="cpu")
        if self.classes is not None:
            return {self.argument: sound, "labels": self.classes(n, generator)}
        labels = random_ids((n, self.tokens), self.vocab_size, self.pad_token_id, generator)
        if self.masked:
            mask = torch.ones(sound.shape[:2], dtype=torch.long, device="cpu")
            return {self.argument: sound, "attention_mask": mask, "labels": labels}

        return {self.argument: sound, "labels": labels}


def sound_batches(asked: Asked) -> RandomSound:
    """The batches of a model of sound, by its config. Raises InputError: its forward takes none."""
    argument = next(
        (name for name in asked.arguments if name in ("input_features", "input_values")), None
    )
    if argument is None:
        message = f"autofit knows no batches of sound for {asked.name}."
        raise InputError(message, YOUR_FUNCTION)

    shape = _shape(asked, argument)
    if asked.task.classifies:
        asked.no_length("sound")
        return RandomSound(argument, shape, class_labels(asked.config))

    text = asked.config.get_text_config(decoder=True)
    vocabulary = asked.size(text, "vocab_size")
    pad = padding(text, vocabulary)
    if asked.task.labels == "transcript":
        asked.no_length("sound")
        masked = argument == "input_features" and "attention_mask" in asked.arguments
        return RandomSound(
            argument,
            shape,
            None,
            _TOKENS_A_SECOND * _SECONDS,
            vocabulary,
            pad,
            masked=masked,
        )

    limits = whole_numbers(text, *_MOST_TOKENS)
    most = limits[0] if limits else None
    if asked.sequence_length is None:
        most = min(most or _USUAL_TOKENS, _USUAL_TOKENS)
    length = asked.length(most)

    return RandomSound(argument, shape, None, length, vocabulary, pad, length)


def _shape(asked: Asked, argument: str) -> tuple[int, ...]:
    """Of one sample: a wave [samples] or a spectrogram, [bins, frames] for Whisper and [frames, bins] for others."""
    config: Any = getattr(asked.config, "encoder_config", None) or getattr(
        asked.config,
        "encoder",
        asked.config,
    )
    frames = round(_SECONDS / _FRAME_SECONDS)
    # sound is always padded to 30 s, two frames of which make a position
    if config.model_type == "whisper":
        return asked.size(config, "num_mel_bins"), 2 * asked.size(config, "max_source_positions")
    if config.model_type == "audio-spectrogram-transformer":
        return asked.size(config, "max_length"), asked.size(config, "num_mel_bins")
    if argument == "input_values":
        return (_SECONDS * SAMPLING_RATE,)
    if config.model_type == "pop2piano":  # its features are as wide as the model
        return frames, asked.size(config, "d_model")
    keys = (
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "input_dim",
        "n_mels",
    )
    bins = asked.size(config, *keys)
    # of two frames, and what each differs by from those around it
    if config.model_type.startswith("granite_speech5"):
        return frames // 2, 4 * bins

    return frames, bins
