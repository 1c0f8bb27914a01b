"""CLIP's text encoders, where they are trained beside the UNet that they tell of prompts: those of
Stable Diffusion and of SDXL.

Prompts do not come encoded then: a batch holds their tokens. One module holds all that is trained:
the encoders, in the order in which they run, and the UNet after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.core.errors import InputError, is_whole

if TYPE_CHECKING:
    import torch
    from torch import nn

FIRST, SECOND = "text_encoder", "text_encoder_2"  # the folders of a pipeline

# What a batch calls the tokens of prompts, by the encoder that reads them.
PROMPTS = {FIRST: "prompt_ids", SECOND: "prompt_ids_2"}
# The classes of transformers.
CLASSES = {FIRST: "CLIPTextModel", SECOND: "CLIPTextModelWithProjection"}
# Of a tokenizer beside each.
TOKENIZERS = {FIRST: "tokenizer", SECOND: "tokenizer_2"}

_UNET = "UNet2DConditionModel"
_ENCODED = ("encoder_hidden_states", "pooled_projections")  # what they make of prompts
_NO_OPTION = ("torch_dtype", "dtype", "architectures", "transformers_version")

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


def encoders_of(kind: str, conditions: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The text encoders that a denoiser is trained with.

    Args:
        kind: the denoiser's class.
        conditions: the shapes of what it is told of a sample, by their names.

    Raises:
        InputError: it is no UNet.
    """
    if kind != _UNET:
        message = f"text encoders are trained beside a UNet (sd-1.5, sdxl), not a {kind}."
        raise InputError(message, "Leave train_text_encoders out: their outputs are cached then.")
    if "pooled_projections" in conditions:
        return FIRST, SECOND
    return (FIRST,)


def check_encoders(
    name: str,
    encoders: Mapping[str, Config],
    conditions: Mapping[str, tuple[int, ...]],
) -> None:
    """Hold the configs of text encoders against what their denoiser is told.

    Args:
        name: what errors call the pipeline.
        conditions: as of `encoders_of`.

    Raises:
        InputError: what they make of a prompt is of another size, or a prompt has more tokens than
            they take.
    """
    tokens, width = conditions["encoder_hidden_states"]
    made = 0
    for folder, config in encoders.items():
        made += _whole(config, "hidden_size", folder)
        _whole(config, "vocab_size", folder)

        most = config.get("max_position_embeddings", tokens)
        if tokens > most:
            message = f"the {folder} of {name} takes prompts of {most} tokens, not {tokens}."
            raise InputError(message, f"Give at most {most}.")
        if config.get("use_attention_mask"):
            message = f"the {folder} of {name} masks the padding of prompts, which is not known."
            raise InputError(message, "Leave train_text_encoders out.")

    _check_width(name, made, width)
    if SECOND in encoders:
        projected = _whole(encoders[SECOND], "projection_dim", SECOND)
        _check_width(name, projected, conditions["pooled_projections"][0])


def _check_width(name: str, made: int, taken: int) -> None:
    """Raise an InputError where text encoders make more or fewer numbers than are taken."""
    if made != taken:
        message = f"the text encoders of {name} make {made} numbers where its UNet takes {taken}."
        raise InputError(message, "Check that all its configs are of one pipeline.")


def _whole(config: Config, key: str, folder: str) -> int:
    """A size that a config names."""
    value = config.get(key)
    if not is_whole(value, 1):
        message = f"the config of the {folder} has no {key} that is a whole number."
        raise InputError(message, "Correct config.json.")
    return int(value)


def told_in_tokens(
    conditions: Mapping[str, tuple[int, ...]],
    encoders: Mapping[str, Config],
) -> Shapes:
    """The conditions of a sample with the tokens of its prompt in place of what is made of them."""
    tokens = conditions["encoder_hidden_states"][0]
    told = {name: shape for name, shape in conditions.items() if name not in _ENCODED}
    for folder in encoders:
        told[PROMPTS[folder]] = (tokens,)
    return told


def vocabularies(encoders: Mapping[str, Config]) -> dict[str, int]:
    """How many different tokens there are, by their names in a batch."""
    return {PROMPTS[folder]: int(config["vocab_size"]) for folder, config in encoders.items()}


def with_new_encoders(unet: nn.Module, encoders: Mapping[str, Config]) -> nn.Module:
    """A UNet with text encoders of random float32 weights, by their configs."""
    import transformers

    made = {}
    for folder, config in encoders.items():
        options = {key: value for key, value in config.items() if key not in _NO_OPTION}
        model = getattr(transformers, CLASSES[folder])
        made[folder] = model(transformers.CLIPTextConfig.from_dict(options))
    return joined(unet, made)


def with_saved_encoders(
    unet: nn.Module,
    encoders: Mapping[str, Config],
    weights: str | Path,
) -> nn.Module:
    """A UNet with the text encoders of a pipeline's directory or hub id, in float32; raises what
    transformers raises."""
    import torch
    import transformers

    loaded = {}
    for folder in encoders:
        model = getattr(transformers, CLASSES[folder])
        loaded[folder] = model.from_pretrained(weights, subfolder=folder, dtype=torch.float32)
    return joined(unet, loaded)


def joined(unet: nn.Module, encoders: Mapping[str, nn.Module]) -> nn.Module:
    """One module of a UNet and its text encoders, by the names of a pipeline's folders.

    It is called with noisy latents, timesteps, and of the batch PROMPTS and `time_ids`; it gives
    the prediction, of the shape of the latents. Prompts are encoded as StableDiffusionPipeline and
    StableDiffusionXLPipeline do it.
    """
    module: nn.Module = _class()(unet, encoders)
    return module.train(unet.training)  # all in one mode, as the libraries load them


def parts_of(model: Any) -> dict[str, Any]:
    """The denoiser and the text encoders of what `joined` made, by the names of their folders."""
    return dict(model.named_children())


def _inside(state: Mapping[str, torch.Tensor], folder: str) -> dict[str, torch.Tensor]:
    """The weights of one part, by the names that they have in it."""
    start = f"{folder}."
    return {name.removeprefix(start): state[name] for name in state if name.startswith(start)}


def _save_part(part: Any, state: dict[str, torch.Tensor], place: Path) -> None:
    """Write given weights as a part's own library does."""
    from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    if type(part).__name__ in CLASSES.values():
        part.save_pretrained(place, state_dict=state)
        return
    part.save_config(place)  # diffusers takes no weights beside
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, place / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


@cache
def _class() -> Any:
    import torch
    from torch import nn

    class WithTextEncoders(nn.Module):
        """A UNet after the text encoders that tell it of prompts."""

        _supports_sdpa = True
        text_encoder: Any
        text_encoder_2: Any

        def __init__(self, unet: Any, encoders: Mapping[str, nn.Module]) -> None:
            super().__init__()
            for folder, encoder in encoders.items():
                self.add_module(folder, encoder)
            self.unet = unet
            self._repeated_blocks = unet._repeated_blocks  # diffusers' name

        def forward(
            self,
            noisy: torch.Tensor,
            timesteps: torch.Tensor,
            prompt_ids: torch.Tensor,
            prompt_ids_2: torch.Tensor | None = None,
            time_ids: torch.Tensor | None = None,
        ) -> torch.Tensor:
            added = None
            if prompt_ids_2 is None:
                prompt = self.text_encoder(prompt_ids).last_hidden_state
            else:  # of SDXL: what goes into the last layer of each
                first = self.text_encoder(prompt_ids, output_hidden_states=True)
                second = self.text_encoder_2(prompt_ids_2, output_hidden_states=True)
                prompt = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
                added = {"text_embeds": second.text_embeds, "time_ids": time_ids}

            predicted: torch.Tensor = self.unet(
                noisy,
                timesteps,
                prompt,
                added_cond_kwargs=added,
                return_dict=False,
            )[0]
            return predicted

        def save_pretrained(
            self,
            directory: str | Path,
            state_dict: Mapping[str, torch.Tensor] | None = None,
        ) -> None:
            """Write each part into the folder that it has in a pipeline; `state_dict`: the weights
            of all, where the modules hold shares of them."""
            for folder, part in parts_of(self).items():
                place = Path(directory) / folder
                if state_dict is None:
                    part.save_pretrained(place)
                else:
                    _save_part(part, _inside(state_dict, folder), place)

    return WithTextEncoders
