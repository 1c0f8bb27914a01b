"""What tools that train denoisers must know of one: its family, and the sizes of its pictures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.models.diffusion.latents import RandomLatents
from autofit.models.diffusion.pipeline import (
    DiffusersModel,
    PictureSizes,
    diffusion_workload,
    presets,
)

SD_15 = "Stable Diffusion 1.5"
SDXL = "SDXL"
SD_35 = "Stable Diffusion 3.5"
FLUX = "Flux"
QWEN_IMAGE = "Qwen-Image"
WAN = "Wan"

_FAMILIES = {
    "SD3Transformer2DModel": SD_35,
    "FluxTransformer2DModel": FLUX,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "WanTransformer3DModel": WAN,
}
_WIDTH_OF_SD_15 = 768  # of its text encoder


@dataclass(frozen=True)
class Pictures:
    """A denoiser and its data, as tools are told of them.

    Attributes:
        family: what tools know the denoiser as; None: as none of those above.
        hub: the pipeline's name on the hub or its directory; None: not known.
        width, height: of a picture in pixels.
        frames: of a video; None: of pictures.
        prompt_tokens: of each prompt.
        blocks: of a transformer: those of two streams and those of one.
        text_encoders: the folders of those that are trained beside it.
    """

    family: str | None
    hub: str | None
    width: int
    height: int
    frames: int | None
    prompt_tokens: int
    blocks: tuple[int, int] = (0, 0)
    text_encoders: tuple[str, ...] = ()

    @property
    def is_square(self) -> bool:
        """Whether a picture is as wide as it is high."""
        return self.width == self.height


def pictures_of(model: DiffusersModel, source: Mapping[str, Any]) -> Pictures:
    """The facts of a denoiser that a result's `source` names; raises as `diffusion_workload`."""
    sizes = PictureSizes(
        source.get("resolution"),
        source.get("frames"),
        source.get("prompt_tokens"),
        train_text_encoders=source.get("train_text_encoders"),
    )
    workload = diffusion_workload(model, sizes)
    trained: Any = workload.model
    batch = workload.batch
    assert isinstance(batch, RandomLatents), "of a denoiser"

    hub = source.get("path")
    if source.get("kind") == "preset":
        hub = presets()[str(source["model"])]["hub"]

    config = model.whole_config()
    frames = None
    if model.denoiser.has_frames:
        frames = source.get("frames") or model.usual.get("frames")
    return Pictures(
        family=_family(model.kind, config),
        hub=hub,
        width=batch.width,
        height=batch.height,
        frames=frames,
        prompt_tokens=batch.prompt_tokens,
        blocks=(config.get("num_layers", 0), config.get("num_single_layers", 0)),
        text_encoders=tuple(trained.text_encoders),
    )


def family_of_preset(name: str) -> str | None:
    """What tools know a preset's denoiser as."""
    config = presets()[name]["denoiser"]
    return _family(config["_class_name"], config)


def blocks_of_preset(name: str) -> int:
    """The blocks of a preset's transformer; 0 of a UNet."""
    config = presets()[name]["denoiser"]
    return int(config.get("num_layers", 0) + config.get("num_single_layers", 0))


def _family(kind: str, config: Mapping[str, Any]) -> str | None:
    """What tools know a class of denoisers as."""
    if kind != "UNet2DConditionModel":
        return _FAMILIES.get(kind)
    if config.get("addition_embed_type") == "text_time":
        return SDXL
    if config.get("cross_attention_dim") == _WIDTH_OF_SD_15:
        return SD_15
    return None
