"""`autofit train` of a denoiser: pictures with captions, or latents that are there already."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from autofit.api.file_reader import blaming
from autofit.api.fit import Trained, fit
from autofit.api.sample_pictures import sample_pictures
from autofit.api.saved_place import place_of
from autofit.core.errors import InputError, pluralize
from autofit.core.events import Listener, Note
from autofit.core.files import check_readable, digest
from autofit.core.place import given_place
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.data.data_cache import cached_folder
from autofit.data.images import check_pillow
from autofit.data.latents import (
    NoisyLoader,
    captioned_pictures,
    in_order,
    latents_loader,
    read_latents,
)
from autofit.models.diffusion.encode import Bucket, Captioned, check_encoded, encode, picture_size
from autofit.models.diffusion.latents import RandomLatents
from autofit.models.diffusion.pipeline import (
    DiffusersModel,
    buckets_of,
    diffusers_class,
    downscale,
)
from autofit.models.diffusion.samples import check_samples
from autofit.models.losses import with_options
from autofit.training.loop import Callback

_ENCODED = "encoded-{}.safetensors"  # by the number of the bucket
_KOHYA = "kohya.safetensors"
_ADAPTER = "pytorch_lora_weights.safetensors"  # as diffusers names it, and its users load it


def train_pictures(
    saved: SavedResult,
    workload: Workload,
    data: Path,
    *,
    weights: str | Path | None,
    eval_data: Path | None,
    loss_options: Mapping[str, Any] | None,
    output: Path | None,
    by_shape: bool,
    sample_every: int | None,
    sample_prompts: Sequence[str],
    seed: int,
    callbacks: tuple[Callback, ...],
    listener: Listener,
    **training: Any,
) -> Trained:
    """Train the denoiser of a result; the arguments are those of `train`.

    Raises:
        InputError: the data are no pictures or latents of these sizes, or the weights no pipeline.
    """
    model = workload.model
    assert isinstance(model, DiffusersModel), "its caller has looked"
    check_samples(sample_every, sample_prompts, output=output, weights=weights)
    loss = with_options(workload.loss, loss_options or {})
    load = partial(_loader, model, workload, by_shape=by_shape)
    loader = load(data, weights, listener)
    evaluated = None
    if eval_data is not None:
        evaluated = in_order(load(eval_data, weights, listener))
    if sample_every is not None and output is not None and weights is not None:
        samples = sample_pictures(
            model,
            workload,
            loss,
            data,
            weights,
            output,
            every=sample_every,
            prompts=sample_prompts,
            listener=listener,
        )
        callbacks = (*callbacks, samples)

    torch.manual_seed(seed)
    trained_model = model() if weights is None else _load(model, weights)
    trained = fit(
        trained_model,
        loader,
        loss=loss,
        config=saved.config,
        eval_loader=evaluated,
        seed=seed,
        output_dir=output,
        callbacks=callbacks,
        listener=listener,
        **training,
        **place_of(saved),
    )

    place = given_place()
    adapters = output and output / "model" / "adapter_model.safetensors"
    if adapters and adapters.is_file() and (place is None or not place.rank):
        _save_for_diffusers(trained.model, model.folder, adapters)
        listener(Note(f"for pipeline.load_lora_weights: {adapters.with_name(_ADAPTER)}"))
    return trained


def _load(model: DiffusersModel, weights: str | Path) -> Any:
    """The denoiser with the weights of a pipeline's directory or hub id."""
    with blaming("denoiser", weights):
        return diffusers_class(model.kind).from_pretrained(
            weights, subfolder=model.folder, dtype=torch.float32
        )


def _loader(
    model: DiffusersModel,
    workload: Workload,
    data: Path,
    weights: str | Path | None,
    listener: Listener,
    *,
    by_shape: bool,
) -> NoisyLoader:
    """The loader of a folder of pictures, or of a file of latents."""
    sizes: Any = workload.batch
    assert isinstance(sizes, RandomLatents), "its batches are made by it"
    check_readable(data, "the data")
    notes: list[str] = []
    if data.is_dir():
        buckets = _encoded(model, sizes, data, weights, notes, by_shape=by_shape)
    else:
        buckets = [(sizes, read_latents(data, sizes.shapes()))]
    for note in notes:
        listener(Note(note))

    told = [{**tensors, **size.told(len(tensors["latents"]))} for size, tensors in buckets]
    return latents_loader(told, workload.effective_batch_size, sizes.noise, notes)


def _encoded(
    model: DiffusersModel,
    sizes: RandomLatents,
    folder: Path,
    weights: str | Path | None,
    notes: list[str],
    *,
    by_shape: bool,
) -> list[tuple[RandomLatents, dict[str, torch.Tensor]]]:
    """The latents and embeddings of a folder's pictures by size, kept in the user's cache.

    Args:
        by_shape: of several sizes, as the pictures' own shapes are; else of one.
    """
    pictures = captioned_pictures(folder, notes)
    check_pillow(folder)
    check_encoded(model)
    if weights is None:
        message = "pictures are encoded by a VAE and text encoders, and no weights are given."
        raise InputError(message, "Give --weights DIR, or --data a .safetensors file of latents.")

    buckets: list[Bucket] = [(sizes, pictures)]
    if by_shape:
        buckets = _by_shape(model, sizes, pictures)
        shapes = [f"{len(some)} of {size.width}x{size.height}" for size, some in buckets]
        notes.append(f"pictures by shape: {', '.join(shapes)}.")

    facts = [str(weights)]
    for size, some in buckets:
        facts.append(repr(size))
        for file, caption in some:
            with file.open("rb") as content:
                facts += [hashlib.file_digest(content, "sha256").hexdigest(), caption]

    def build(part: Path) -> None:
        for number, tensors in enumerate(encode(model, weights, buckets)):
            safetensors.torch.save_file(tensors, part / _ENCODED.format(number))

    kept = cached_folder(digest("\0".join(facts)), build)
    notes.append(f"{pluralize(len(pictures), 'picture')} of {folder} encoded, in {kept}.")
    return [
        (size, safetensors.torch.load_file(kept / _ENCODED.format(number)))
        for number, (size, _) in enumerate(buckets)
    ]


def _by_shape(
    model: DiffusersModel,
    sizes: RandomLatents,
    pictures: Sequence[Captioned],
) -> list[Bucket]:
    """Pictures by the bucket whose shape is nearest to their own; no empty ones."""
    ratios = {w / h: (w, h) for w, h in buckets_of(model, sizes.width, sizes.height)}
    sorted_in: dict[tuple[int, int], list[Captioned]] = {}
    for picture in pictures:
        width, height = picture_size(picture[0])
        nearest = min(ratios, key=lambda ratio: abs(math.log(ratio * height / width)))
        sorted_in.setdefault(ratios[nearest], []).append(picture)

    scale = downscale(model)
    buckets: list[Bucket] = []
    for (width, height), some in sorted_in.items():
        shape = (*sizes.shape[:-2], height // scale, width // scale)
        buckets.append((replace(sizes, shape=shape, width=width, height=height), some))
    return buckets


def _save_for_diffusers(model: Any, folder: str, adapters: Path) -> None:
    """Write a model's adapters beside those of peft, as `load_lora_weights` of a pipeline reads them."""
    from peft import get_peft_model_state_dict

    save: Callable[..., None] = diffusers_class("StableDiffusionPipeline")._save_lora_weights
    (name,) = model.peft_config
    config = model.peft_config[name]
    state = get_peft_model_state_dict(model, adapter_name=name)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    save(
        adapters.parent,
        lora_layers={folder: tensors},
        lora_metadata={folder: config.to_dict()},
        weight_name=_ADAPTER,
    )
    if folder == "unet" and not config.use_dora:
        _save_for_kohya(tensors, config, adapters.with_name(_KOHYA))


def _save_for_kohya(tensors: Mapping[str, torch.Tensor], config: Any, file: Path) -> None:
    """Write a UNet's adapters as kohya's scripts name them, which other programs of pictures read.

    There an adapter is multiplied by alpha / rank.
    """
    from diffusers.utils import convert_state_dict_to_kohya

    rank = config.r
    alpha = float(config.lora_alpha)
    if config.use_rslora:  # peft divides by the root of the rank
        alpha *= rank**0.5
    of_unet = {f"unet.{key}": value for key, value in tensors.items()}
    named = convert_state_dict_to_kohya(of_unet)
    for key in named:
        if key.endswith(".alpha"):
            named[key] = torch.tensor(alpha)
    safetensors.torch.save_file(named, file)
