"""Sample pictures while a denoiser is trained: it is asked between two steps, as training asks it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autofit.api.file_reader import blaming
from autofit.core.errors import InputError
from autofit.core.events import Listener, Note
from autofit.core.files import digest
from autofit.core.workload import Workload
from autofit.data.data_cache import cached_folder
from autofit.data.latents import captioned_pictures
from autofit.models.diffusion.latents import RandomLatents
from autofit.models.diffusion.pipeline import DiffusersModel
from autofit.models.diffusion.samples import Embeddings, check_sampled, decode, embed, sample
from autofit.models.losses.diffusion import Diffusion
from autofit.setup import Setup
from autofit.setup.state import evaluation_mode
from autofit.training.loop import ModelCallback

_FOLDER = "samples"
_NAME = "step-{:06d}-{}.png"  # by the steps that are done, and the number of the prompt
_EMBEDDED = "prompts.safetensors"
_MOST_CAPTIONS = 2


@dataclass(frozen=True)
class SamplePictures(ModelCallback):
    """Makes a picture of each prompt before training, and every so many steps.

    Attributes:
        weights: whose VAE decodes them.
        sizes: of the pictures.
        every: steps between two sets.
        folder: receives them.
    """

    model: DiffusersModel
    loss: Diffusion
    weights: str | Path
    sizes: RandomLatents
    embeddings: Embeddings
    every: int
    folder: Path

    def ask(self, setup: Setup, step: int) -> None:
        """Make a set of pictures where it is due; all ranks ask the denoiser, the first one writes.

        Raises:
            InputError: no device has whole layers, or the VAE cannot be loaded.
        """
        if setup.ranks.layout.same_samples > 1:
            message = "no sample pictures are made where devices divide layers, tokens or blocks."
            raise InputError(message, "Leave --sample-every out, or train on one device.")
        if step % self.every:
            return

        with evaluation_mode(setup.model):
            latents = sample(self.model, self.loss, self.sizes, self.embeddings, _OneByOne(setup))
        setup.exchange.reshard()
        if not setup.ranks.is_first:
            return

        with blaming("VAE", self.weights):
            pictures = decode(self.weights, latents)
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(pictures, 1):
            picture.save(self.folder / _NAME.format(step, number))


class _OneByOne(nn.Module):
    """Stands in a pipeline for the denoiser that is trained, and asks it as a training step does.

    It is asked for one sample at a time: a pipeline asks with the prompt and without one at once,
    which may need more memory than a micro-batch of one.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup = setup
        self.device = setup.device
        self.dtype = torch.float32  # of what it gets and gives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._setup.model, name)

    def cache_context(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        """Nothing is kept from one step of denoising to the next."""
        return nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        """The denoiser's prediction for all samples."""
        setup = self._setup
        noisy = args[0] if args else kwargs["hidden_states"]
        samples = len(noisy)
        predicted = []
        for number in range(samples):
            own_args, own_kwargs = _sample_of((args, kwargs), number, samples)
            with setup.step_context(), setup.forward_context():
                predicted.append(setup.model(*own_args, **own_kwargs)[0])
        return (torch.cat(predicted).to(noisy.dtype),)


def _sample_of(arguments: Any, number: int, samples: int) -> Any:
    """The same arguments with one sample of the tensors that have so many."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() and len(tensor) == samples:
            return tensor[number : number + 1]
        return tensor

    return tree_map_only(torch.Tensor, own, arguments)


def sample_pictures(
    model: DiffusersModel,
    workload: Workload,
    loss: Any,
    data: Path,
    weights: str | Path,
    output: Path,
    *,
    every: int,
    prompts: Sequence[str],
    listener: Listener,
) -> SamplePictures:
    """What makes sample pictures, with prompts that are encoded now, and kept in the user's cache.

    Args:
        loss: that is trained with.
        prompts: none: the first two captions of `data`.

    Raises:
        InputError: there are no captions, or the denoiser is not asked for pictures.
    """
    sizes: Any = workload.batch
    check_sampled(model, loss)
    prompts = list(prompts) or _captions(data)
    tokens = sizes.conditions["encoder_hidden_states"][0]

    def build(part: Path) -> None:
        embeddings = embed(model, weights, prompts, tokens)
        safetensors.torch.save_file(embeddings, part / _EMBEDDED)

    facts = ["prompts", model.kind, str(weights), str(tokens), *prompts]
    kept = cached_folder(digest("\0".join(facts)), build)
    embeddings = safetensors.torch.load_file(kept / _EMBEDDED)

    folder = output / _FOLDER
    listener(Note(f"sample pictures every {every} steps, in {folder}: {'; '.join(prompts)}"))
    return SamplePictures(model, loss, weights, sizes, embeddings, every, folder)


def _captions(data: Path) -> list[str]:
    """The first different captions of a folder of pictures."""
    captions: list[str] = []
    if data.is_dir():
        captions = [caption for _, caption in captioned_pictures(data, []) if caption]
    if not captions:
        message = f"{data} has no captions to make sample pictures of."
        raise InputError(message, "Give --sample-prompt TEXT.")
    return list(dict.fromkeys(captions))[:_MOST_CAPTIONS]
