"""The knobs of several devices, in words that tools share: those of FSDP in transformers and axolotl, the file that
accelerate launches processes by, and sentences for tools that cannot divide a model as it was measured."""

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


def rows(
    data_parallel: Share,
    replicate: Share | None = None,
    reshard: Share | None = None,
    offload: Share | None = None,
    *,
    tensor: Share | None = None,
    context: Share | None = None,
) -> dict[str, Share]:
    """The rows of a tool; what has none of its own is said by another, or is no split. The number of shards is what is
    left."""
    return {
        "data_parallel": data_parallel,
        "data_parallel_replicate": replicate or _covered,
        "data_parallel_shard": _covered,
        "reshard_after_forward": reshard or _covered,
        "fsdp_offload": offload or _covered,
        "tensor_parallel": tensor or partial(unsplit, knob="tensor_parallel"),
        "context_parallel": context or partial(unsplit, knob="context_parallel"),
    }


def unsplit(request: Request, knob: str, why: str = "") -> ToolKeys:
    """`tensor_parallel` or `context_parallel` of a tool that does not split layers or samples, or why it does not."""
    degree = request.config.get(knob)
    if degree in (None, 1):
        return ToolKeys(as_measured=True)
    what = (
        why or f"{request.title} splits no {'layers' if knob == 'tensor_parallel' else 'samples'}"
    )
    left = f"{what}, and trains on {degree} times fewer devices, each of which holds more than measured"

    return request.keys(knob, {}, left, may_not_fit=True)


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
    title, why, on_cpu = title or request.title, None, request.source.device == "cpu"
    if is_fsdp(request) and on_cpu:
        why = ON_CPU.format(title)
    elif is_fsdp(request) and (autocast or request.config.precision.endswith("-mixed")):
        why = REDUCED.format(title)

    return request.keys("data_parallel", keys, why, may_not_fit=on_cpu)


def reshard(request: Request, path: str) -> ToolKeys:
    """`reshard_after_forward` of a tool that takes true and false."""
    value = request.config.reshard_after_forward
    some = type(value) is int
    keys = {} if value is None else {path: bool(value)}

    return request.keys(
        "reshard_after_forward",
        keys,
        _GROUPS.format(request.title) if some else None,
    )


def offload(request: Request, path: str) -> ToolKeys:
    """`fsdp_offload` of a tool that takes true and false."""
    value = request.config.fsdp_offload
    return ToolKeys({} if value is None else {path: value == "cpu"})


def sentence(instead: Callable[[Request], str], *, may_not_fit: bool = False) -> dict[str, Share]:
    """The rows of a tool that can do nothing of it, which is said once for all of them."""

    def share(request: Request) -> ToolKeys:
        several = request.source.layout.world > 1 or request.config.data_parallel in ("ddp", "fsdp")
        what = instead(request) if several else None
        return ToolKeys(
            {},
            request.keys("data_parallel", {}, what, may_not_fit=may_not_fit).deviations,
            not several,
        )

    return rows(share, tensor=_covered, context=_covered)


def on_one_device(title: str) -> dict[str, Share]:
    """The rows of a tool that trains on one device."""

    def instead(request: Request) -> str:
        count = request.layout.dp_degree
        batch = (
            f", and takes {count} times the gradient_accumulation_steps for the same batch"
            if count > 1
            else ""
        )
        return f"{title} trains on one device here, which has to hold all weights{batch}"

    return sentence(instead, may_not_fit=True)


def accelerate(
    prefix: str = "",
    off: Mapping[str, Any] | None = None,
    tensor: str = "",
    context: str = "",
) -> dict[str, Share]:
    """The rows of a file for `accelerate launch`, below a prefix; `off` are the keys of one device, `tensor` and
    `context` what a tool deviates by that splits layers or samples."""

    def sections(request: Request) -> ToolKeys:
        kind = request.config.data_parallel
        if kind not in ("ddp", "fsdp") and request.layout.world == 1:
            return ToolKeys(off or {}, as_measured=True)
        # which alone may be beside a split
        kind = "ddp" if kind == "ddp" or request.source.device == "cpu" else "fsdp"
        keys: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP"
            if kind == "fsdp"
            else "MULTI_GPU",  # MULTI_CPU would start one
            "num_machines": request.nodes,
            "num_processes": request.layout.world,
            "machine_rank": 0,
        }
        if kind == "fsdp":
            words = {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "state_dict_type": "FULL_STATE_DICT",
            }
            words["cpu_ram_efficient_loading"] = request.config.quantization == "none"
            keys |= {f"fsdp_config.fsdp_{name}": value for name, value in words.items()}

        keys = {f"{prefix}{name}": value for name, value in keys.items()}

        return by_accelerate(request, keys, "accelerate")

    def sizes(request: Request, knob: str = "", instead: str = "") -> ToolKeys:
        words = {} if request.config.data_parallel == "ddp" else parallelism(request)
        words = {
            f"{prefix}parallelism_config.parallelism_config_{name}": each
            for name, each in words.items()
        }
        if not knob:
            return ToolKeys(words)

        return (
            request.keys(knob, words, instead)
            if instead and request.config.get(knob) not in (None, 1)
            else unsplit(request, knob)
        )

    fsdp = f"{prefix}fsdp_config.fsdp_"
    return rows(
        *(sections, sizes, partial(reshard, path=f"{fsdp}reshard_after_forward")),
        partial(offload, path=f"{fsdp}offload_params"),
        tensor=partial(sizes, knob="tensor_parallel", instead=tensor),
        context=partial(sizes, knob="context_parallel", instead=context),
    )


def parallelism(request: Request) -> dict[str, int]:
    """The sizes of accelerate's ParallelismConfig; none where all devices are shards, or accelerate divides nothing."""
    layout = request.layout
    if layout.world in (1, layout.shard) or request.source.device == "cpu":
        return {}
    sizes = {"dp_replicate_size": layout.replicate, "dp_shard_size": layout.shard}

    return {**sizes, "tp_size": layout.tensor, "cp_size": layout.context}


def launched(name: str) -> Files:
    """`files` of a tool with one YAML file, and beside it the one that accelerate starts several processes by."""

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
