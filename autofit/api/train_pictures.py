"""`autofit train` of a denoiser: pictures with captions, or latents that are there already."""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
from autofit.models.diffusion.text_encoders import FIRST, SECOND, parts_of, with_saved_encoders
from autofit.models.losses import with_options
from autofit.training.loop import Callback

_ENCODED = "encoded-{}.safetensors"  # by the number of the bucket
_KOHYA = "kohya.safetensors"
_BODY = "text_model."  # in the names of a text encoder's layers
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
        _save_for_diffusers(trained.model, model, adapters)
        listener(Note(f"for pipeline.load_lora_weights: {adapters.with_name(_ADAPTER)}"))
    return trained


def _load(model: DiffusersModel, weights: str | Path) -> Any:
    """The denoiser with the weights of a pipeline's directory or hub id; with its text encoders,
    where they are trained."""
    with blaming("denoiser", weights):
        denoiser = diffusers_class(model.kind).from_pretrained(
            weights, subfolder=model.folder, dtype=torch.float32
        )
    if not model.text_encoders:
        return denoiser
    with blaming("text encoders", weights):
        return with_saved_encoders(denoiser, model.text_encoders, weights)


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
        _check_tokens(data, buckets[0][1], sizes.vocabularies)
    for note in notes:
        listener(Note(note))

    told = [{**tensors, **size.told(len(tensors["latents"]))} for size, tensors in buckets]
    return latents_loader(told, workload.effective_batch_size, sizes.noise, notes)


def _check_tokens(
    data: Path,
    tensors: Mapping[str, torch.Tensor],
    vocabularies: Mapping[str, int],
) -> None:
    """Raise an InputError for tokens of prompts in a file that no text encoder has."""
    for name, most in vocabularies.items():
        ids = tensors[name]
        is_fine = ids.dtype in (torch.int32, torch.int64)
        if not is_fine or int(ids.min()) < 0 or int(ids.max()) >= most:
            message = f"{data}: {name} must hold whole numbers from 0 to {most - 1}."
            raise InputError(message, "Save what the pipeline's tokenizer gives.")


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


def _save_for_diffusers(trained: Any, model: DiffusersModel, adapters: Path) -> None:
    """Write a model's adapters beside those of peft, as `load_lora_weights` of a pipeline reads
    them."""
    from peft import get_peft_model_state_dict

    (name,) = trained.peft_config
    config = trained.peft_config[name]
    state = get_peft_model_state_dict(trained, adapter_name=name)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    parts = {model.folder: tensors}
    facts = {model.folder: config.to_dict()}
    if model.text_encoders:
        parts = _by_folder(tensors, parts_of(trained))
        facts = {folder: _facts_of_part(config, part) for folder, part in parts.items()}

    save: Callable[..., None] = diffusers_class("StableDiffusionPipeline")._save_lora_weights
    save(
        adapters.parent,
        lora_layers=parts,
        lora_metadata=facts,
        weight_name=_ADAPTER,
    )
    if model.folder == "unet" and not config.use_dora:
        is_sdxl = SECOND in model.text_encoders
        _save_for_kohya(parts, config, is_sdxl, adapters.with_name(_KOHYA))


def _by_folder(
    tensors: Mapping[str, torch.Tensor], folders: Collection[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each part of a model that has any, by the names that they have in the part.

    In the first text encoder as older transformers names them, which newer ones read, too.
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        folder, _, inner = name.partition(".")
        assert folder in folders, "nothing else has adapters"
        if folder == FIRST and not inner.startswith(_BODY):
            inner = f"{_BODY}{inner}"
        parts.setdefault(folder, {})[inner] = tensor
    return parts


def _facts_of_part(config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What peft's config says of one part of a model, whose layers have shorter names."""
    layers = {name.partition(".lora_")[0].removeprefix(_BODY) for name in tensors}
    return {**config.to_dict(), "target_modules": sorted(layers)}


def _save_for_kohya(
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    config: Any,
    is_sdxl: bool,
    file: Path,
) -> None:
    """Write adapters of a UNet, and of its text encoders, as kohya's scripts name them, which other
    programs of pictures read.

    There an adapter is multiplied by alpha / rank.
    """
    from diffusers.utils import convert_state_dict_to_kohya

    rank = config.r
    alpha = float(config.lora_alpha)
    if config.use_rslora:  # peft divides by the root of the rank
        alpha *= rank**0.5

    prefixes = {FIRST: "lora_te1_", SECOND: "lora_te2_"}
    if not is_sdxl:
        prefixes[FIRST] = "lora_te_"
    written = {}
    for folder, tensors in parts.items():
        named = convert_state_dict_to_kohya({f"unet.{key}": tensors[key] for key in tensors})
        for key, tensor in named.items():
            told = torch.tensor(alpha) if key.endswith(".alpha") else tensor
            written[key.replace("lora_unet_", prefixes.get(folder, "lora_unet_"), 1)] = told
    safetensors.torch.save_file(written, file)
