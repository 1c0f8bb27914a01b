"""Lightning: the `trainer:` section of a LightningCLI config, for any model. The model, its data and its optimizer
belong to the user's LightningModule."""

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
    "Lightning keeps the gradients of a step through the next forward, unless on_train_batch_end of your module calls"
    " self.optimizers().zero_grad()"
)
_INSTEAD = {"tf32": shared.TF32.format("Lightning"), "fp8": shared.FP8.format("Lightning")}


def _precision(request: Request) -> ToolKeys:
    value, frozen = request.config.precision, shared.frozen_in_mixed_precision(request)
    why = "Lightning leaves frozen weights as your module makes them, float32 if it does not say"
    instead = why if frozen else _INSTEAD.get(value, shared.convolutions(request))
    keys = {"trainer.precision": shared.LIGHTNING_PRECISION[value]}
    return request.keys("precision", keys, instead, may_not_fit=frozen)


def _accumulation(request: Request) -> ToolKeys:
    """Where several micro-batches make a step, gradients were there in all forwards but the first."""
    knob = "gradient_accumulation_steps"
    steps = request.config[knob]
    why = _GRADIENTS if steps == 1 else None
    return request.keys(knob, {"trainer.accumulate_grad_batches": steps}, why, may_not_fit=True)


def _data_parallel(request: Request) -> ToolKeys:
    kind, layout, nodes = request.config.data_parallel, request.layout, request.nodes
    keys = {
        "trainer.devices": layout.world // nodes,
        **({"trainer.num_nodes": nodes} if nodes > 1 else {}),
    }
    strategy = {_STRATEGY: "ddp_find_unused_parameters_true"}
    if kind == "fsdp" and request.source.device == "cpu":  # where it refuses its FSDP
        why = several_devices.ON_CPU.format("Lightning")
        return request.keys("data_parallel", keys | strategy, why, may_not_fit=True)
    if kind == "fsdp":
        why = "Lightning's is FSDP 1; it divides what your auto_wrap_policy names, which has to be the blocks"
        return request.keys(
            "data_parallel",
            {**keys, **_strategy(request, "data_parallel").keys},
            why,
            may_not_fit=True,
        )
    return ToolKeys(keys | (strategy if kind == "ddp" else {}), (), True)


def _strategy(request: Request, knob: str) -> ToolKeys:
    """The keys of all knobs of FSDP, which decide the strategy together."""
    layout, reshard, offload = request.layout, *(request.config[name] for name in _OF_FSDP[1:])
    if not several_devices.is_fsdp(request) or request.source.device == "cpu":
        return ToolKeys(as_measured=True)
    groups, kept = layout.replicate > 1, reshard is False
    kind = "HYBRID_SHARD" if groups else "SHARD_GRAD_OP" if kept else "FULL_SHARD"
    options: dict[str, Any] = {} if reshard is None else {"sharding_strategy": kind}
    options |= {} if offload is None else {"cpu_offload": offload == "cpu"}
    options |= {"device_mesh": [layout.replicate, layout.shard]} if groups else {}
    keys = {f"{_STRATEGY}.init_args.{name}": value for name, value in options.items()}
    why = None
    if knob == "reshard_after_forward" and (type(reshard) is int or (groups and kept)):
        why = "Lightning gives weights up between forward and backward, with less memory and more time than measured"
    return request.keys(
        knob, {f"{_STRATEGY}.class_path": "lightning.pytorch.strategies.FSDPStrategy", **keys}, why
    )


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
            "micro_batch_size", {}, _BATCHES, may_not_fit=True
        ),
        "gradient_accumulation_steps": _accumulation,
    },
)
