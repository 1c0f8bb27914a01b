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
# fewer than the 12.5 outputs of the slowest encoders, so that every CTC loss is finite
_TOKENS_A_SECOND = 8
# Under which keys configs have the bins of a spectrogram.
_BINS = (
    "num_mel_bins",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_dim",
    "n_mels",
)
_MOST_TOKENS = ("max_target_positions", "max_text_positions", "max_position_embeddings")
_USUAL_TOKENS = 448  # Whisper's most


@dataclass(frozen=True)
class RandomSound:
    """n -> normally distributed sound [n, *shape], and as labels its class [n] or the tokens said
    in it [n, tokens].

    Attributes:
        argument: of the forward: input_values for waves, input_features for spectrograms.
        sequence_length: the tokens, where they are what is asked for.
        masked: whether the forward counts the frames in a mask.
    """

    argument: str
    shape: tuple[int, ...]
    classes: ClassLabels | None = None
    tokens: int = 0
    vocab_size: int = 0
    pad_token_id: int | None = None
    sequence_length: int | None = None
    masked: bool = False

    def __call__(self, n: int) -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator(device="cpu").manual_seed(SEED)
        sound = torch.randn((n, *self.shape), generator=generator, device="cpu")
        batch = {self.argument: sound}
        if self.classes is not None:
            batch["labels"] = self.classes(n, generator)
            return batch

        if self.masked:
            frames = sound.shape[:2]
            batch["attention_mask"] = torch.ones(frames, dtype=torch.long, device="cpu")

        shape = (n, self.tokens)
        batch["labels"] = random_ids(shape, self.vocab_size, self.pad_token_id, generator)
        return batch


def sound_batches(asked: Asked) -> RandomSound:
    """The batches of a model of sound, by its config.

    Raises:
        InputError: its forward takes none.
    """
    known = [name for name in asked.arguments if name in ("input_features", "input_values")]
    if not known:
        message = f"autofit knows no batches of sound for {asked.name}."
        raise InputError(message, YOUR_FUNCTION)

    argument = known[0]
    shape = _shape(asked, argument)
    if asked.task.classifies:
        asked.no_length("sound")
        return RandomSound(argument, shape, class_labels(asked.config))

    text = asked.config.get_text_config(decoder=True)
    vocabulary = asked.size(text, "vocab_size")
    is_transcribed = asked.task.labels == "transcript"
    length = None
    if is_transcribed:
        asked.no_length("sound")
    else:
        length = asked.length(_most_tokens(asked, text))

    has_mask = argument == "input_features" and "attention_mask" in asked.arguments
    return RandomSound(
        argument,
        shape,
        tokens=length or _TOKENS_A_SECOND * _SECONDS,
        vocab_size=vocabulary,
        pad_token_id=padding(text, vocabulary),
        sequence_length=length,
        masked=is_transcribed and has_mask,
    )


def _most_tokens(asked: Asked, text: Any) -> int | None:
    """The most tokens of a sample: what the decoder allows, and without a length that is given no
    more than Whisper's."""
    most = None
    limits = whole_numbers(text, *_MOST_TOKENS)
    if limits:
        most = limits[0]
    if asked.sequence_length is None:
        return min(most or _USUAL_TOKENS, _USUAL_TOKENS)
    return most


def _shape(asked: Asked, argument: str) -> tuple[int, ...]:
    """Of one sample: a wave [samples] or a spectrogram, [bins, frames] for Whisper and [frames,
    bins] for others."""
    config: Any = asked.config
    for part in ("encoder", "encoder_config"):
        config = getattr(asked.config, part, None) or config

    kind = config.model_type
    # sound is always padded to 30 s, two frames of which make a position
    if kind == "whisper":
        return asked.size(config, "num_mel_bins"), 2 * asked.size(config, "max_source_positions")
    if kind == "audio-spectrogram-transformer":
        return asked.size(config, "max_length"), asked.size(config, "num_mel_bins")
    if argument == "input_values":
        return (_SECONDS * SAMPLING_RATE,)

    frames = round(_SECONDS / _FRAME_SECONDS)
    if kind == "pop2piano":  # its features are as wide as the model
        return frames, asked.size(config, "d_model")

    bins = asked.size(config, *_BINS)
    # of two frames, and what each differs by from those around it
    if kind.startswith("granite_speech5"):
        return frames // 2, 4 * bins

    return frames, bins
