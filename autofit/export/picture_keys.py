"""Keys that the tools for denoisers share, and what all of them refuse. They train adapters here;
each has its own scripts or presets for training in full."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from autofit.core.some_blocks import offloaded_of, offloads
from autofit.core.tasks.diffusion import DIFFUSION
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.pictures import Pictures
from autofit.export.source import WEIGHTS, ExportSource, batches_fit
from autofit.export.tool import Request, Share, ToolKeys

TASKS = (DIFFUSION.name,)
DATA = "path/to/pictures"  # where a search knew no data
CAPTIONS = "txt"  # beside each picture

_LOSS = "computes the mean squared error alone"


def facts(source: ExportSource) -> Pictures:
    """The denoiser and its pictures, which `refuse` has looked for."""
    assert source.pictures is not None, "refused without them"
    return source.pictures


def share_streamed(request: Request) -> float:
    """The share of the blocks whose weights rest on the host; of a UNet, all or none."""
    value = request.config.parameter_offload
    blocks = sum(facts(request.source).blocks)
    return offloaded_of(value, blocks) / blocks if blocks else float(offloads(value))


def weights(source: ExportSource) -> str:
    """The hub's name or the directory of the pipeline."""
    return facts(source).hub or WEIGHTS


def data(source: ExportSource) -> str:
    """The folder of pictures."""
    return source.data or DATA


def resolution(source: ExportSource, between: str) -> str:
    """The width and the height of a picture with something between."""
    found = facts(source)
    return f"{found.width}{between}{found.height}"


def refuse(source: ExportSource, title: str, families: Collection[str]) -> str | None:
    """Why a tool that knows these families of denoisers cannot train a config, or None."""
    found = source.pictures
    if found is None:
        return f"{title} is told of a pipeline's directory or a preset, and this is neither."
    if found.family not in families:
        named = found.family or "this denoiser"
        return f"{title} does not train {named}; it is written here for {', '.join(families)}."
    if not source.config.lora_rank:
        return f"{title} is written here for adapters, and this trains all weights."
    return batches_fit(source)


def missing(title: str) -> dict[str, Share]:
    """The rows of knobs that none of the tools has anything for."""
    return {
        **shared.missing(title, "optimizer_offload", "kernels", loss=f"{title} {_LOSS}"),
        **several_devices.on_one_device(title),
    }


def kinds_of_adapter(title: str, *knobs: str) -> dict[str, Share]:
    """The rows of kinds of adapters that a tool does not know."""
    plain = f"{title} trains plain adapters"
    rows: dict[str, Share] = shared.missing(title, may_not_fit=False, **dict.fromkeys(knobs, plain))
    return rows


def targets_by_kind(request: Request, inside: str, keys: Mapping[str, Any]) -> ToolKeys:
    """`lora_targets` of a tool that puts adapters beside layers of its own choice.

    Args:
        inside: which these are, in words.
    """
    instead = f"{request.title} puts adapters beside {inside}"
    fewer = request.config.lora_targets in ("all-linear", "all-linear+head", None)
    return request.keys("lora_targets", keys, instead, may_not_fit=not fewer)


def fused_attention(request: Request, keys: Mapping[str, Any]) -> ToolKeys:
    """`attention` of a tool that calls PyTorch's fused attention."""
    value = request.config.attention
    if value in ("sdpa", None):
        return ToolKeys(keys)
    instead = f"{request.title} calls PyTorch's fused attention, which chooses by itself"
    return request.keys("attention", keys, instead)


def compiled(request: Request, keys: Mapping[str, Any], *, by_blocks: bool) -> ToolKeys:
    """`compile` of a tool that compiles block by block, or the model as one."""
    value = request.config.compile
    if value == "none":
        return ToolKeys(keys)

    instead = None
    if not by_blocks:
        instead = f"{request.title} compiles the model as one, in its default mode"
    elif value != "default":
        instead = f"{request.title} compiles in its default mode, without timing several kernels"
    return request.keys("compile", keys, instead)


def checkpointing(path: str) -> Share:
    """The row of checkpoints of a tool that checkpoints every block or none."""
    return partial(shared.whole_blocks, path=path)
