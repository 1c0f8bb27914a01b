"""Lightning: the `trainer:` section of a LightningCLI config, for any model. The model, its data and its optimizer
belong to the user's LightningModule."""

from autofit.core.workload import Hyperparameters
from autofit.export import shared_keys as shared
from autofit.export.tool import Request, Tool, ToolKeys

_BATCHES = "Lightning takes the batches of your data module; give it this batch_size"
_INSTEAD = {"tf32": shared.TF32.format("Lightning"), "fp8": shared.FP8.format("Lightning")}


def _precision(request: Request) -> ToolKeys:
    value, frozen = request.text("precision"), shared.frozen_in_mixed_precision(request)
    why = "Lightning leaves frozen weights as your module makes them, float32 if it does not say"
    instead = why if frozen else _INSTEAD.get(value, shared.convolutions(request))
    keys = {"trainer.precision": shared.LIGHTNING_PRECISION[value]}
    return request.keys("precision", keys, instead, may_not_fit=frozen)


TOOL = Tool(
    title="Lightning",
    versions=("2.6.6",),
    run="python YOUR_CLI.py fit --config lightning.yaml",
    fixed=lambda request: {
        "trainer.accelerator": "cpu" if request.source.device == "cpu" else "gpu",
        "trainer.devices": 1,
        "trainer.max_epochs": 1,
        "trainer.gradient_clip_val": Hyperparameters().max_grad_norm,
    },
    without="Lightning's Trainer has no argument for it; your LightningModule has to do it",
    knobs={
        "precision": _precision,
        "micro_batch_size": lambda request: request.keys("micro_batch_size", {}, _BATCHES, may_not_fit=True),
        **shared.values(gradient_accumulation_steps="trainer.accumulate_grad_batches"),
    },
)
