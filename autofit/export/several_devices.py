"""The knobs of several devices, in words that tools share: those of FSDP in transformers and axolotl, the file that
accelerate launches processes by, and sentences for tools that cannot divide a model as it was measured."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from autofit.core.layout import Layout
from autofit.export.source import ExportSource
from autofit.export.template import yaml_file
from autofit.export.tool import Header, Request, Share, ToolKeys

KNOBS = ("data_parallel", "data_parallel_replicate", "data_parallel_shard", "reshard_after_forward", "fsdp_offload")
_GROUPS = (
    "{} gives weights up between forward and backward on all devices, with less memory and more time than measured"
)
REDUCED = "{} averages gradients in 16 bits, which were measured in float32"


def rows(
    data_parallel: Share, replicate: Share | None = None, reshard: Share | None = None, offload: Share | None = None
) -> dict[str, Share]:
    """The rows of a tool; what has none of its own is said by another. The number of shards is what is left."""
    given = (data_parallel, replicate or _covered, _covered, reshard or _covered, offload or _covered)
    return dict(zip(KNOBS, given, strict=True))


def _covered(request: Request) -> ToolKeys:
    return ToolKeys(as_measured=True)


def is_fsdp(request: Request) -> bool:
    """Whether weights are divided over devices."""
    return request.text("data_parallel") == "fsdp"


def reduced(request: Request, title: str = "") -> str | None:
    """How accelerate's FSDP deviates in mixed precision."""
    mixed = is_fsdp(request) and request.text("precision").endswith("-mixed")
    return REDUCED.format(title or request.title) if mixed else None


def reshard(request: Request, path: str) -> ToolKeys:
    """`reshard_after_forward` of a tool that takes true and false."""
    value = request.config["reshard_after_forward"]
    some = type(value) is int
    keys = {} if value is None else {path: bool(value)}
    return request.keys("reshard_after_forward", keys, _GROUPS.format(request.title) if some else None)


def offload(request: Request, path: str) -> ToolKeys:
    """`fsdp_offload` of a tool that takes true and false."""
    value = request.config["fsdp_offload"]
    return ToolKeys({} if value is None else {path: value == "cpu"})


def sentence(instead: Callable[[Request], str], *, may_not_fit: bool = False) -> dict[str, Share]:
    """The rows of a tool that can do nothing of it, which is said once for all of them."""

    def share(request: Request) -> ToolKeys:
        several = request.text("data_parallel") in ("ddp", "fsdp")
        what = instead(request) if several else None
        return ToolKeys({}, request.keys("data_parallel", {}, what, may_not_fit=may_not_fit).deviations, not several)

    return rows(share)


def on_one_device(title: str) -> dict[str, Share]:
    """The rows of a tool that trains on one device."""

    def instead(request: Request) -> str:
        count = request.source.layout.samplers
        batch = f", and takes {count} times the gradient_accumulation_steps for the same batch" if count > 1 else ""
        return f"{title} trains on one device here, which has to hold all weights{batch}"

    return sentence(instead, may_not_fit=True)


def accelerate(prefix: str = "", off: Mapping[str, Any] | None = None) -> dict[str, Share]:
    """The rows of a file for `accelerate launch`, below a prefix; `off` are the keys of one device."""

    def sections(request: Request) -> ToolKeys:
        kind, source = request.text("data_parallel"), request.source
        if kind not in ("ddp", "fsdp"):
            return ToolKeys(off or {}, as_measured=True)
        plain = "MULTI_CPU" if source.device == "cpu" else "MULTI_GPU"
        keys: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP" if kind == "fsdp" else plain,
            "num_machines": source.nodes,
            "num_processes": source.layout.world,
            "machine_rank": 0,
        }
        if kind == "fsdp":
            words = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
            words["cpu_ram_efficient_loading"] = request.text("quantization") == "none"
            keys |= {f"fsdp_config.fsdp_{name}": value for name, value in words.items()}
        keys = {f"{prefix}{name}": value for name, value in keys.items()}
        return request.keys("data_parallel", keys, reduced(request, "accelerate"))

    def sizes(request: Request) -> ToolKeys:
        words = parallelism(request.source.layout) if is_fsdp(request) else {}
        return ToolKeys({f"{prefix}parallelism_config.parallelism_config_{name}": each for name, each in words.items()})

    fsdp = f"{prefix}fsdp_config.fsdp_"
    return rows(
        *(sections, sizes, partial(reshard, path=f"{fsdp}reshard_after_forward")),
        partial(offload, path=f"{fsdp}offload_params"),
    )


def parallelism(layout: Layout) -> dict[str, int]:
    """The sizes of accelerate's ParallelismConfig; none where all devices are shards."""
    if layout.world in (1, layout.shard):
        return {}
    sizes = {"dp_replicate_size": layout.replicate, "dp_shard_size": layout.shard}
    return {**sizes, "tp_size": layout.tensor, "cp_size": layout.context}


def launched(name: str) -> Callable[[ExportSource, Mapping[str, Any], Header], dict[str, str]]:
    """`files` of a tool with one YAML file, and beside it the one that accelerate starts several processes by."""

    def files(source: ExportSource, tree: Mapping[str, Any], header: Header) -> dict[str, str]:
        own = {key: value for key, value in tree.items() if key != "accelerate"}
        made = {f"{name}.yaml": yaml_file(header, own)}
        if "accelerate" in tree:
            first = f"For accelerate launch; what is trained stands in {name}.yaml."
            made[f"{name}_accelerate.yaml"] = yaml_file((first,), tree["accelerate"])
        return made

    return files
