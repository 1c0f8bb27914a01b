"""What a file of a tool for pictures trains: the pipeline that its model is of, and how large the
pictures are."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.config import Value
from autofit.core.errors import InputError, is_whole, shown
from autofit.core.knobs.parameter_offload import KNOB as PARAMETER_OFFLOAD
from autofit.export.pictures import FLUX, QWEN_IMAGE, SD_15, SD_35, SDXL, WAN, family_of_preset
from autofit.export.source import ExportSource
from autofit.models.diffusion.pipeline import is_pipeline, presets

# What stands in the names of models of a family, where a file says it by nothing else.
_WORDS = {
    QWEN_IMAGE: r"qwen.?image",
    WAN: r"\bwan",
    FLUX: r"flux",
    SD_35: r"(sd|diffusion).?3[._]?5",
    SDXL: r"xl",
    SD_15: r"v?1[._-]5",
}
# Text encoders of a family beside the denoiser, in GiB of 16 bits, as their configs make them:
# CLIP-L has 123 million weights, CLIP-G 695, T5-XXL's encoder 4,762, Qwen2.5-VL 8,292, UMT5-XXL's
# encoder 5,681.
_ENCODERS_GIB = {SD_15: 0.2, SDXL: 1.5, SD_35: 10.4, FLUX: 9.1, QWEN_IMAGE: 15.4, WAN: 10.6}


@dataclass(frozen=True)
class PicturesOfFile:
    """What a file says of its pictures.

    Attributes:
        family: as `export.pictures` names it; None: the file does not say it.
        resolution: of the largest, as "1024" or "1024x768"; None: as the model was made for.
        frames: of a video; None: it is not said.
        prompt_tokens: of each prompt; None: as many as the model takes.
        trains_text_encoders: whether they get adapters, too.
    """

    family: str | None
    resolution: str | None = None
    frames: int | None = None
    prompt_tokens: int | None = None
    trains_text_encoders: bool = False


def preset_like(named: str, family: str | None) -> tuple[str, str | None]:
    """The preset or directory that a named model is of, and a note where it is taken to be like it.

    Args:
        named: a name on the hub, or the path of a file or a directory.

    Raises:
        InputError: nothing says which family it is of.
    """
    if is_pipeline(Path(named).expanduser()):
        return named, None

    for preset, entry in presets().items():
        if str(entry["hub"]).lower() == named.lower():
            return preset, None

    family = family or family_named(named)
    like = [preset for preset in presets() if family_of_preset(preset) == family]
    if not like:
        known = ", ".join(presets())
        message = f"the file does not say what kind of model {shown(named)} is."
        raise InputError(message, f"Give --model, a pipeline's directory or one of {known}.")

    preset = _of_that_size(named, like)
    return preset, f"{named} is taken to have the shape of {preset}."


def family_named(named: str) -> str | None:
    """The family whose words stand in a name."""
    for family, words in _WORDS.items():
        if re.search(words, named, re.IGNORECASE):
            return family
    return None


def _of_that_size(named: str, presets_of_family: Sequence[str]) -> str:
    """Of a family's presets the one whose size stands in a name; else the largest."""
    for preset in presets_of_family:
        size = preset.rpartition("-")[2]
        if re.search(rf"(?<![a-z0-9]){re.escape(size)}(?![a-z0-9])", named.lower()):
            return preset
    return presets_of_family[-1]


def largest_resolution(sizes: Sequence[Any], key: str) -> str | None:
    """The largest of the resolutions that a file names, as WIDTHxHEIGHT; None where it names none.

    Args:
        sizes: each as 1024, "1024", "1024,768", "1024x768" or [1024, 768].
        key: what errors call them.

    Raises:
        InputError: one is no resolution.
    """
    if not sizes:
        return None
    width, height = max((_sides(each, key) for each in sizes), key=math.prod)
    return f"{width}x{height}"


def _sides(found: Any, key: str) -> tuple[int, int]:
    """The width and the height of one resolution in pixels."""
    match = re.fullmatch(r"\[?(\d{2,5})(?:\s*[x,]\s*(\d{2,5}))?\]?", str(found).strip())
    if match is None:
        message = f"{key} must be pixels, such as 1024 or 1024,768, not {shown(found)}."
        raise InputError(message, "Correct it.")
    width = int(match[1])
    return width, int(match[2] or width)


def whole(keys: Mapping[str, Any], key: str) -> int | None:
    """A whole number that a file may name.

    Raises:
        InputError: it is none.
    """
    found = keys.get(key)
    if found is None:
        return None
    if not is_whole(found, 1):
        raise InputError(f"{key} must be a whole number, not {shown(found)}.", "Correct it.")
    return int(found)


def encoders_stay(family: str | None, remedy: str) -> str:
    """The note on text encoders that stay on the device beside the denoiser.

    Args:
        remedy: what to write into the file.
    """
    size = f", {_ENCODERS_GIB[family]} GiB in 16 bits," if family else ""
    return f"text encoders stay on the device{size} and are not counted in what is said. {remedy}"


def offloaded_blocks(source: ExportSource) -> dict[str, tuple[Value, ...]]:
    """The numbers of blocks whose weights may rest on the host, as values of that knob."""
    assert source.pictures is not None, "a file of a tool for pictures"
    numbers = (f"cpu:{number}" for number in range(1, sum(source.pictures.blocks)))
    return {PARAMETER_OFFLOAD.name: ("none", "cpu", *numbers)}
