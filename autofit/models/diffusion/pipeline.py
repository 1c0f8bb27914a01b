"""A pipeline of diffusers, by a preset or a directory, as the workload that trains its denoiser.

Only configs are read: `model_index.json`, and those of the denoiser, the scheduler and the VAE.
diffusers is imported where a model is made.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.core.config_faults import config_fault
from autofit.core.errors import InputError, is_whole, require, sentence, shown, unknown
from autofit.core.files import expanded, read_text
from autofit.core.strict_yaml import load_own
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.core.workload import Workload
from autofit.models.diffusion.denoisers import DENOISERS, Denoiser
from autofit.models.diffusion.latents import RandomLatents
from autofit.models.diffusion.text_encoders import (
    CLASSES,
    check_encoders,
    encoders_of,
    told_in_tokens,
    vocabularies,
    with_new_encoders,
)
from autofit.models.losses import with_options
from autofit.models.losses.diffusion import Diffusion, schedule_options

if TYPE_CHECKING:
    from torch import nn

INDEX = "model_index.json"
EFFECTIVE_BATCH_SIZE = 4  # a quarter or a half of that is usual for adapters

_FOLDERS = ("unet", "transformer")  # of a pipeline's denoiser
_MOST_BYTES = 2**24  # of a config
_DOWNSCALE = 8  # pixels on the side of a latent, of every VAE of these pipelines
_MOST_PIXELS = 2**14  # on a side
# of a config that describes no model: not RuntimeError, which running out of memory is
_WRONG_CONFIG = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class PictureSizes:
    """What is asked for; None: the sizes of the preset, or the usual ones.

    Attributes:
        resolution: "1024", or WIDTHxHEIGHT as "832x480".
        frames: of a video.
        prompt_tokens: of each prompt.
        effective_batch_size: samples of an optimizer step.
        train_text_encoders: beside the denoiser, instead of caching their outputs.
    """

    resolution: str | None = None
    frames: int | None = None
    prompt_tokens: int | None = None
    effective_batch_size: int | None = None
    train_text_encoders: bool | None = None

    def to_source(self) -> dict[str, Any]:
        """Those given that a `source:` keeps."""
        given = {
            "resolution": self.resolution,
            "frames": self.frames,
            "prompt_tokens": self.prompt_tokens,
            "train_text_encoders": self.train_text_encoders or None,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class DiffusersModel:
    """() -> the denoiser with random float32 weights; plain data that can be pickled.

    Attributes:
        config: of the denoiser, with the name of its class as `_class_name`.
        scheduler: its config.
        vae: that of the VAE, of which the size of latents is read.
        usual: what data it was made for: `resolution` and `frames`.
        folder: the pipeline's folder that holds the denoiser.
        text_encoders: the configs of those that are trained beside it, by their folders. The model
            is then of all of them, as `text_encoders.joined` makes it.
    """

    name: str
    config: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    vae: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "transformer"
    text_encoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of its class."""
        return str(self.config["_class_name"])

    @property
    def denoiser(self) -> Denoiser:
        """What is particular to its class."""
        return DENOISERS[self.kind]

    @property
    def changed(self) -> dict[str, Any]:
        """What identifies it beside its config."""
        return {"text_encoders": dict(self.text_encoders)} if self.text_encoders else {}

    def whole_config(self) -> dict[str, Any]:
        """Its config with the defaults of its class; raises as `diffusers_class`."""
        import inspect

        given = {key: value for key, value in self.config.items() if not key.startswith("_")}
        arguments = inspect.signature(diffusers_class(self.kind).__init__).parameters
        defaults = {
            name: argument.default
            for name, argument in arguments.items()
            if argument.default is not argument.empty
        }
        return {**defaults, **given}

    def __call__(self) -> nn.Module:
        """Build the model on the current default device. Raises InputError: diffusers is not
        installed, or the config describes no model that can be built."""
        made = diffusers_class(self.kind)
        given = {key: value for key, value in self.config.items() if not key.startswith("_")}
        try:
            model: nn.Module = made(**given)
            if self.text_encoders:
                model = with_new_encoders(model, self.text_encoders)
        except _WRONG_CONFIG as error:
            message, remedy = config_fault(error) or (f"{sentence(error)}.", "")
            raise InputError(
                f"{self.name} cannot be built from its config: {message}", remedy
            ) from error
        return model


def diffusers_class(name: str) -> Any:
    """A class of diffusers. Raises InputError where it is not installed, or has none of that name."""
    # which says, as it is imported, that it cannot read checkpoints that torchao quantised
    logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)
    try:
        import diffusers
    except ImportError as error:
        raise InputError(
            "models of pictures need diffusers, which is not installed.",
            "Run: pip install 'torch-autofit[diffusion]'.",
        ) from error
    found = getattr(diffusers, name, None)
    if found is None:
        message = f"this version of diffusers ({diffusers.__version__}) has no {name}."
        raise InputError(message, "Install a newer one.")
    return found


def is_pipeline(path: Path) -> bool:
    """Whether a directory holds a pipeline of diffusers."""
    with contextlib.suppress(OSError):
        return (path / INDEX).is_file()
    return False


def read_pipeline(path: str | Path) -> DiffusersModel:
    """The denoiser of a pipeline's directory. Raises InputError: a file that is not there or cannot
    be read, or a denoiser of a class that is not known."""
    path = expanded(path, "the directory of a model").resolve()
    index = _read(path / INDEX)
    folder = next((name for name in _FOLDERS if index.get(name)), None)
    if folder is None:
        message = f"{path / INDEX} names no denoiser ({' or '.join(_FOLDERS)})."
        raise InputError(message, "Give the directory of a pipeline of diffusers.")

    config = _read(path / folder / "config.json")
    kind = config.get("_class_name")
    if kind not in DENOISERS:
        known = ", ".join(DENOISERS)
        message = f"the denoiser of {path} is a {shown(kind)}, which autofit cannot ask."
        raise InputError(message, f"It knows {known}; or give a function: file.py:function.")

    vae = path / "vae" / "config.json"
    return DiffusersModel(
        path.name,
        config,
        _read(path / "scheduler" / "scheduler_config.json"),
        _read(vae) if vae.is_file() else {},
        source={"kind": "directory", "path": str(path)},
        folder=folder,
    )


def _read(path: Path) -> dict[str, Any]:
    """The mapping that a JSON file holds."""
    try:
        content = json.loads(read_text(path, most=_MOST_BYTES))
    except FileNotFoundError as error:
        raise InputError(f"{path} is not there.", "Give a whole pipeline of diffusers.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", "Check the file.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} holds no valid JSON.", "Correct it.") from error
    if not isinstance(content, dict):
        message = f"{path} should hold a mapping, not {type(content).__name__}."
        raise InputError(message, "Correct it.")
    return content


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The entries of presets.yaml by their names."""
    return dict(load_own(Path(__file__).parent / "presets.yaml"))


def preset_pipeline(name: str) -> DiffusersModel:
    """The model of a preset. Raises InputError: there is none of that name."""
    if name not in presets():
        raise unknown("model", name, presets())
    entry = presets()[name]
    kind = entry["denoiser"]["_class_name"]
    return DiffusersModel(
        name,
        entry["denoiser"],
        entry["scheduler"],
        entry.get("vae", {}),
        {key: entry[key] for key in ("resolution", "frames") if key in entry},
        {"kind": "preset", "model": name},
        "unet" if kind.startswith("UNet") else "transformer",
    )


def diffusion_workload(
    model: DiffusersModel,
    sizes: PictureSizes,
    loss_options: Mapping[str, Any] | None = None,
) -> Workload:
    """The workload of training that denoiser on random latents of the sizes that are asked for.

    Raises:
        InputError: sizes that its latents cannot have, text encoders that are not trained here, or
            a config or options that are wrong.
    """
    wanted = sizes.train_text_encoders
    rule = "train_text_encoders must be True or False"
    require(wanted is None or isinstance(wanted, bool), rule, wanted)
    if wanted:
        model = with_text_encoders(model)

    loss = with_options(
        Diffusion(model.kind, **schedule_options(model.scheduler)), loss_options or {}
    )
    source = {**model.source, **sizes.to_source()}
    if loss_options:
        source["loss_options"] = dict(loss_options)

    batch = latents_for(model, sizes, loss)
    pictures = f"{batch.width} x {batch.height} pixels"
    if len(batch.shape) > 3:
        pictures = f"{_frames_of(model, sizes)} frames of {pictures}"
    tokens = batch.prompt_tokens
    note = (
        f"latents of {pictures} and embeddings of {tokens} tokens are cached: VAE and text encoders "
        "take no memory."
    )
    if model.text_encoders:
        note = (
            f"latents of {pictures} are cached: the VAE takes no memory. Text encoders are trained, "
            f"on prompts of {tokens} tokens."
        )
    batch_size = sizes.effective_batch_size
    return Workload(
        model=model,
        batch=batch,
        loss=loss,
        effective_batch_size=EFFECTIVE_BATCH_SIZE if batch_size is None else batch_size,
        task=DIFFUSION.name,
        name=model.name,
        source=source,
        notes=(note,),
    )


def with_text_encoders(model: DiffusersModel) -> DiffusersModel:
    """The same with its text encoders, which are trained beside the denoiser.

    Raises:
        InputError: they are others than those of Stable Diffusion or SDXL, or a file of theirs is
            not there or cannot be read.
    """
    if model.text_encoders:
        return model
    conditions = conditions_of(model, model.denoiser.prompt_tokens)
    names = encoders_of(model.kind, conditions)
    if model.source.get("kind") == "preset":
        return replace(model, text_encoders=presets()[model.name]["text_encoders"])

    path = Path(str(model.source["path"]))
    index = _read(path / INDEX)
    configs = {}
    for name in names:
        if index.get(name) != ["transformers", CLASSES[name]]:
            message = f"the pipeline {path} has no {CLASSES[name]} as its {name}."
            remedy = "Leave train_text_encoders out: their outputs are cached then."
            raise InputError(message, remedy)
        configs[name] = _read(path / name / "config.json")
    return replace(model, text_encoders=configs)


def latents_for(model: DiffusersModel, sizes: PictureSizes, loss: Diffusion) -> RandomLatents:
    """The batches of a denoiser; raises as `diffusion_workload`."""
    denoiser = model.denoiser
    config = model.whole_config()
    width, height = _sides(model, sizes, config)
    tokens = denoiser.prompt_tokens if sizes.prompt_tokens is None else sizes.prompt_tokens
    rule = "the tokens of a prompt must be a positive whole number"
    require(is_whole(tokens, 1), rule, tokens, f"For example {denoiser.prompt_tokens}.")

    scale = downscale(model)
    conditions = conditions_of(model, tokens)
    if model.text_encoders:
        check_encoders(model.name, model.text_encoders, conditions)
        conditions = told_in_tokens(conditions, model.text_encoders)
    with _lacking(model):
        shape: tuple[int, ...] = (denoiser.channels(config), height // scale, width // scale)

    if denoiser.has_frames:
        every = _frames_of_latent(model)
        shape = (shape[0], (_frames_of(model, sizes) - 1) // every + 1, *shape[1:])
    elif sizes.frames is not None:
        message = f"{model.name} makes pictures, which have no frames."
        raise InputError(message, "Leave frames out.")
    flows = loss.prediction == "flow"
    shift = 1.0
    if not model.scheduler.get("use_dynamic_shifting"):
        shift = float(model.scheduler.get("shift", model.scheduler.get("flow_shift", 1.0)))
    return RandomLatents(
        shape,
        conditions,
        height,
        width,
        flows,
        shift,
        loss.train_steps,
        vocabularies(model.text_encoders),
    )


def conditions_of(model: DiffusersModel, tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what a denoiser is told of a sample, encoded.

    Args:
        tokens: of its prompt.

    Raises:
        InputError: the config lacks what says them.
    """
    with _lacking(model):
        return model.denoiser.conditions(model.whole_config(), tokens)


@contextlib.contextmanager
def _lacking(model: DiffusersModel) -> Iterator[None]:
    """Blame the config for what is not in it."""
    try:
        yield
    except (KeyError, TypeError) as error:
        message = f"the config of {model.name} lacks {sentence(error)}."
        raise InputError(message, "Correct config.json.") from error


def downscale(model: DiffusersModel) -> int:
    """Pixels on the side of a latent, as the VAE's config tells."""
    given = model.vae.get("scale_factor_spatial")
    if is_whole(given, 1):
        return int(given)
    blocks = model.vae.get("block_out_channels")
    if isinstance(blocks, list) and blocks:
        return int(2 ** (len(blocks) - 1))
    halves = model.vae.get("temperal_downsample")  # diffusers' spelling
    if isinstance(halves, list):
        return int(2 ** len(halves))
    return _DOWNSCALE


def largest_bucket(model: DiffusersModel, width: int, height: int) -> tuple[int, int]:
    """Width and height of the bucket with most pixels, of those that a tool may sort pictures of
    any shape into that are to have as many pixels as these sides."""
    return max(
        _buckets(width, height, _unit(model)),
        key=lambda sides: (math.prod(sides), -abs(sides[0] * height - sides[1] * width)),
    )


def buckets_of(model: DiffusersModel, width: int, height: int) -> list[tuple[int, int]]:
    """Widths and heights that pictures of any shape are sorted into, in pixels: none has more of
    them than these sides, so that what fits with these fits with all.

    Sides are multiples of about a sixteenth of the shorter one, as kohya's scripts have 64 of 1024.
    """
    unit = _unit(model)
    step = max(1, round(min(width, height) / 16 / unit)) * unit
    return list(dict.fromkeys([(width, height), *_buckets(width, height, step)]))


def _buckets(width: int, height: int, step: int) -> list[tuple[int, int]]:
    """Sides that are multiples of a step with at most as many pixels, none above twice the other;
    for each width the largest height."""
    most = width * height // step**2
    every = [(columns, most // columns) for columns in range(1, most + 1)]
    alike = [sides for sides in every if max(sides) <= 2 * min(sides)] or [(1, 1)]
    return [(columns * step, rows * step) for columns, rows in alike]


def _unit(model: DiffusersModel) -> int:
    """What the sides of pictures are multiples of, in pixels."""
    return downscale(model) * model.denoiser.patch


def _frames_of_latent(model: DiffusersModel) -> int:
    """Frames of a video that one latent stands for, but for the first frame, which has its own."""
    given = model.vae.get("scale_factor_temporal")
    if is_whole(given, 1):
        return int(given)
    halves = model.vae.get("temperal_downsample")
    if isinstance(halves, list):
        return int(2 ** sum(map(bool, halves)))
    return 4  # of Wan's


def _sides(
    model: DiffusersModel, sizes: PictureSizes, config: Mapping[str, Any]
) -> tuple[int, int]:
    """Width and height of a picture in pixels."""
    scale = downscale(model)
    default = model.usual.get("resolution")
    if default is None:  # what UNets and SD3 were made for; what other pipelines make
        side = config.get("sample_size")
        default = str(side * scale) if is_whole(side, 1) else "1024"
    width, height = parse_resolution(sizes.resolution or str(default))

    unit = _unit(model)
    if width % unit or height % unit:
        fitting = (max(width // unit, 1) * unit, max(height // unit, 1) * unit)
        message = f"the sides of {model.name}'s pictures are multiples of {unit} pixels, not {width}x{height}."
        raise InputError(message, f"For example {fitting[0]}x{fitting[1]}.")
    return width, height


def parse_resolution(text: object) -> tuple[int, int]:
    """Width and height of "1024" or "832x480". Raises InputError for anything else."""
    found = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", str(text))
    rule = f"the resolution must be pixels (1024) or WIDTHxHEIGHT (832x480), up to {_MOST_PIXELS:,}"
    require(found is not None, rule, text)
    assert found is not None
    width, height = int(found[1]), int(found[2] or found[1])
    require(min(width, height) >= 1 and max(width, height) <= _MOST_PIXELS, rule, text)
    return width, height


def _frames_of(model: DiffusersModel, sizes: PictureSizes) -> int:
    """The frames of a video."""
    frames = model.usual.get("frames", 1) if sizes.frames is None else sizes.frames
    require(
        is_whole(frames, 1), "frames must be a positive whole number", frames, "For example 81."
    )
    every = _frames_of_latent(model)
    if (frames - 1) % every:
        fitting = (frames - 1) // every * every + 1
        message = (
            f"videos of {model.name} have a multiple of {every} frames and one more, not {frames}."
        )
        raise InputError(message, f"For example {fitting}.")
    return int(frames)
