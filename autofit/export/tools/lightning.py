"""Lightning: the `trainer:` section of a LightningCLI config, for any model. The model, its data
and its optimizer belong to the user's LightningModule."""

from functools import partial
from typing import Any

from autofit.core.workload import Hyperparameters
from autofit.export import several_devices
from autofit.export import shared_keys as shared
from autofit.export.tool import Request, Tool, ToolKeys

_STRATEGY = "trainer.strategy"
_OF_FSDP = ("data_parallel_replicate", "reshard_after_forward", "fsdp_offload")
_BATCHES = "Lightning takes the batches of your data module; give it this batch_size"
_GRADIENTS = (
    "Lightning keeps the gradients of a step through the next forward, "
    "unless on_train_batch_end of your module calls self.optimizers().zero_grad()"
)
_INSTEAD = {"tf32": shared.TF32.format("Lightning"), "fp8": shared.FP8.format("Lightning")}


def _precision(request: Request) -> ToolKeys:
    value = request.config.precision
    keys = {"trainer.precision": shared.LIGHTNING_PRECISION[value]}
    if shared.frozen_in_mixed_precision(request):
        why = (
            "Lightning leaves frozen weights as your module makes them, float32 if it does not say"
        )
        return request.keys("precision", keys, why, may_not_fit=True)

    instead = _INSTEAD.get(value, shared.convolutions(request))

    return request.keys("precision", keys, instead)


def _accumulation(request: Request) -> ToolKeys:
    """Where several micro-batches make a step, gradients were there in all forwards but the
    first."""
    knob = "gradient_accumulation_steps"
    steps = request.config[knob]
    why = _GRADIENTS if steps == 1 else None

    return request.keys(
        knob,
        {"trainer.accumulate_grad_batches": steps},
        why,
        may_not_fit=True,
    )


def _data_parallel(request: Request) -> ToolKeys:
    kind = request.config.data_parallel
    nodes = request.nodes
    keys: dict[str, Any] = {"trainer.devices": request.layout.world // nodes}
    if nodes > 1:
        keys["trainer.num_nodes"] = nodes
    if kind not in ("ddp", "fsdp"):
        return ToolKeys(keys, as_measured=True)

    on_cpu = request.source.device == "cpu"
    if kind == "fsdp" and not on_cpu:
        why = (
            "Lightning's is FSDP 1; it divides what your auto_wrap_policy names, "
            "which has to be the blocks"
        )
        keys |= _strategy(request, "data_parallel").keys
        return request.keys("data_parallel", keys, why, may_not_fit=True)

    keys[_STRATEGY] = "ddp_find_unused_parameters_true"
    if kind == "fsdp":  # which it refuses on a CPU
        why = several_devices.ON_CPU.format("Lightning")
        return request.keys("data_parallel", keys, why, may_not_fit=True)

    return ToolKeys(keys, as_measured=True)


def _strategy(request: Request, knob: str) -> ToolKeys:
    """The keys of all knobs of FSDP, which decide the strategy together."""
    if not several_devices.is_fsdp(request) or request.source.device == "cpu":
        return ToolKeys(as_measured=True)

    layout = request.layout
    reshard = request.config.reshard_after_forward
    offload = request.config.fsdp_offload
    has_groups = layout.replicate > 1
    if has_groups:
        kind = "HYBRID_SHARD"
    elif reshard is False:
        kind = "SHARD_GRAD_OP"
    else:
        kind = "FULL_SHARD"

    keys: dict[str, Any] = {f"{_STRATEGY}.class_path": "lightning.pytorch.strategies.FSDPStrategy"}
    if reshard is not None:
        keys[f"{_STRATEGY}.init_args.sharding_strategy"] = kind
    if offload is not None:
        keys[f"{_STRATEGY}.init_args.cpu_offload"] = offload == "cpu"
    if has_groups:
        keys[f"{_STRATEGY}.init_args.device_mesh"] = [layout.replicate, layout.shard]

    why = None
    in_part = type(reshard) is int or (has_groups and reshard is False)
    if knob == "reshard_after_forward" and in_part:
        why = (
            "Lightning gives weights up between forward and backward, "
            "with less memory and more time than measured"
        )

    return request.keys(knob, keys, why)


TOOL = Tool(
    title="Lightning",
    versions=("2.6.6",),
    caches_casts=False,
    run="python YOUR_CLI.py fit --config {file}",
    run_several="{torchrun} YOUR_CLI.py fit --config {file}",
    fixed=lambda request: {
        "trainer.accelerator": "cpu" if request.source.device == "cpu" else "gpu",
        "trainer.max_epochs": 1,
        "trainer.gradient_clip_val": Hyperparameters().max_grad_norm,
    },
    without="Lightning's Trainer has no argument for it; your LightningModule has to do it",
    knobs={
        **several_devices.rows(
            _data_parallel, *(partial(_strategy, knob=knob) for knob in _OF_FSDP)
        ),
        "precision": _precision,
        "micro_batch_size": lambda request: request.keys(
            "micro_batch_size",
            {},
            _BATCHES,
            may_not_fit=True,
        ),
        "gradient_accumulation_steps": _accumulation,
    },
)
