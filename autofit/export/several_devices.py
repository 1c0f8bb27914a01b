"""The knobs of several devices, in words that tools share: those of FSDP in transformers and
axolotl, the file that accelerate launches processes by, and sentences for tools that cannot divide
a model as it was measured."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from autofit.export.source import ExportSource
from autofit.export.template import yaml_file
from autofit.export.tool import Files, Header, Request, Share, ToolKeys

RING = "{} exchanges keys and values between devices, not heads, which was not measured"
_GROUPS = (
    "{} gives weights up between forward and backward on all "
    "devices, with less memory and more time than measured"
)
REDUCED = "{} averages gradients in 16 bits, which were measured in float32"
ON_CPU = "{} divides no weights on a CPU, and needs more memory than measured"


_UNSPLIT = {
    "tensor_parallel": "splits no layers",
    "context_parallel": "splits no samples",
    "pipeline_parallel": "has no pipelines",
}


def rows(
    data_parallel: Share,
    replicate: Share | None = None,
    reshard: Share | None = None,
    offload: Share | None = None,
    *,
    tensor: Share | None = None,
    context: Share | None = None,
    pipeline: Share | None = None,
) -> dict[str, Share]:
    """The rows of a tool; what has none of its own is said by another, or is no split.

    The number of shards is what is left.
    """
    return {
        "data_parallel": data_parallel,
        "data_parallel_replicate": replicate or _covered,
        "data_parallel_shard": _covered,
        "reshard_after_forward": reshard or _covered,
        "fsdp_offload": offload or _covered,
        "tensor_parallel": tensor or partial(unsplit, knob="tensor_parallel"),
        "context_parallel": context or partial(unsplit, knob="context_parallel"),
        "pipeline_parallel": pipeline or partial(unsplit, knob="pipeline_parallel"),
        "pipeline_schedule": _covered,
    }


def unsplit(request: Request, knob: str, why: str = "") -> ToolKeys:
    """The degree of a tool that does not split layers, samples or models so, or why it does not."""
    degree = request.config.get(knob)
    if degree in (None, 1):
        return ToolKeys(as_measured=True)

    why = why or f"{request.title} {_UNSPLIT[knob]}"
    fewer = f"trains on {degree} times fewer devices, each of which holds more than measured"
    return request.keys(knob, {}, f"{why}, and {fewer}", may_not_fit=True)


def split(
    request: Request,
    knob: str,
    path: str,
    instead: str | None = None,
    further: Mapping[str, Any] | None = None,
) -> ToolKeys:
    """The same knobs of a tool that takes the number of devices, with further keys."""
    degree = request.config.get(knob)
    if degree in (None, 1):
        return ToolKeys(as_measured=True)

    return request.keys(knob, {path: degree, **(further or {})}, instead)


def _covered(request: Request) -> ToolKeys:
    return ToolKeys(as_measured=True)


def is_fsdp(request: Request) -> bool:
    """Whether weights are divided over devices."""
    return request.config.data_parallel == "fsdp"


def by_accelerate(
    request: Request,
    keys: Mapping[str, Any],
    title: str = "",
    *,
    autocast: bool = False,
) -> ToolKeys:
    """`data_parallel` of a tool on accelerate, which divides weights on cards alone."""
    why = None
    on_cpu = request.source.device == "cpu"
    if is_fsdp(request):
        is_reduced = autocast or request.config.precision.endswith("-mixed")
        if on_cpu:
            why = ON_CPU
        elif is_reduced:
            why = REDUCED

    if why:
        why = why.format(title or request.title)
    return request.keys("data_parallel", keys, why, may_not_fit=on_cpu)


def reshard(request: Request, path: str) -> ToolKeys:
    """`reshard_after_forward` of a tool that takes true and false."""
    value = request.config.reshard_after_forward
    if value is None:
        return ToolKeys()

    instead = None
    if type(value) is int:
        instead = _GROUPS.format(request.title)
    return request.keys("reshard_after_forward", {path: bool(value)}, instead)


def offload(request: Request, path: str) -> ToolKeys:
    """`fsdp_offload` of a tool that takes true and false."""
    value = request.config.fsdp_offload
    if value is None:
        return ToolKeys()
    return ToolKeys({path: value == "cpu"})


def sentence(instead: Callable[[Request], str], *, may_not_fit: bool = False) -> dict[str, Share]:
    """The rows of a tool that can do nothing of it, which is said once for all of them."""

    def share(request: Request) -> ToolKeys:
        is_divided = request.config.data_parallel in ("ddp", "fsdp")
        if not is_divided and request.source.layout.world == 1:
            return ToolKeys(as_measured=True)

        what = instead(request)
        return request.keys("data_parallel", {}, what, may_not_fit=may_not_fit)

    return rows(share, tensor=_covered, context=_covered)


def on_one_device(title: str) -> dict[str, Share]:
    """The rows of a tool that trains on one device."""

    def instead(request: Request) -> str:
        what = f"{title} trains on one device here, which has to hold all weights"
        count = request.layout.dp_degree
        if count == 1:
            return what

        steps = f"{count} times the gradient_accumulation_steps"
        return f"{what}, and takes {steps} for the same batch"

    return sentence(instead, may_not_fit=True)


def accelerate(
    prefix: str = "",
    off: Mapping[str, Any] | None = None,
    tensor: str = "",
    context: str = "",
) -> dict[str, Share]:
    """The rows of a file for `accelerate launch`, below a prefix.

    Args:
        off: the keys of one device.
        tensor, context: what a tool deviates by that splits layers or samples.
    """
    fsdp = "fsdp_config.fsdp_"

    def sections(request: Request) -> ToolKeys:
        kind = request.config.data_parallel
        if kind not in ("ddp", "fsdp") and request.layout.world == 1:
            return ToolKeys(off or {}, as_measured=True)

        # FSDP is also what alone may be beside a split
        is_divided = kind != "ddp" and request.source.device != "cpu"
        keys: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "MULTI_GPU",  # MULTI_CPU would start one
            "num_machines": request.nodes,
            "num_processes": request.layout.world,
            "machine_rank": 0,
        }
        if is_divided:
            keys["distributed_type"] = "FSDP"
            keys |= {
                f"{fsdp}version": 2,
                f"{fsdp}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                f"{fsdp}state_dict_type": "FULL_STATE_DICT",
                f"{fsdp}cpu_ram_efficient_loading": request.config.quantization == "none",
            }

        return by_accelerate(request, below(keys), "accelerate")

    def sizes(request: Request, knob: str = "", instead: str = "") -> ToolKeys:
        found: dict[str, int] = {}
        if request.config.data_parallel != "ddp":
            for name, size in parallelism(request).items():
                found[f"parallelism_config.parallelism_config_{name}"] = size

        if not knob:
            return ToolKeys(below(found))
        if not instead or request.config.get(knob) in (None, 1):
            return unsplit(request, knob)
        return request.keys(knob, below(found), instead)

    def below(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{prefix}{name}": value for name, value in keys.items()}

    return rows(
        sections,
        sizes,
        partial(reshard, path=f"{prefix}{fsdp}reshard_after_forward"),
        partial(offload, path=f"{prefix}{fsdp}offload_params"),
        tensor=partial(sizes, knob="tensor_parallel", instead=tensor),
        context=partial(sizes, knob="context_parallel", instead=context),
    )


def parallelism(request: Request) -> dict[str, int]:
    """The sizes of accelerate's ParallelismConfig; none where all devices are shards, or accelerate
    divides nothing."""
    layout = request.layout
    if layout.world in (1, layout.shard) or request.source.device == "cpu":
        return {}

    return {
        "dp_replicate_size": layout.replicate,
        "dp_shard_size": layout.shard,
        "tp_size": layout.tensor,
        "cp_size": layout.context,
    }


def launched(name: str) -> Files:
    """`files` of a tool with one YAML file, and beside it the one that accelerate starts several
    processes by."""

    def files(
        source: ExportSource,
        tree: Mapping[str, Any],
        header: Header,
        file: str,
    ) -> dict[str, str]:
        own = {key: value for key, value in tree.items() if key != "accelerate"}
        made = {file: yaml_file(header, own)}
        if "accelerate" in tree:
            first = f"For accelerate launch; what is trained stands in {file}."
            made[f"{name}_accelerate.yaml"] = yaml_file((first,), tree["accelerate"])

        return made

    return files
