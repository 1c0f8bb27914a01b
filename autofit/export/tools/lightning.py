"""Lightning: the `trainer:` section of a LightningCLI config, for any model.

The model, its data and its optimizer belong to the user's LightningModule.
"""

from autofit.core.workload import Hyperparameters
from autofit.export.shared_keys import FP8, LIGHTNING_PRECISION, TF32, convolutions, value_of
from autofit.export.tool import Request, Tool, ToolKeys
from autofit.export.trainer_tools import batches_fit

_INSTEAD = {"tf32": TF32.format("Lightning"), "fp8": FP8.format("Lightning")}


def _precision(request: Request) -> ToolKeys:
    value = request.text("precision")
    instead = _INSTEAD.get(value, convolutions(request))
    frozen = value.endswith("-mixed") and bool(request.config["lora_rank"])
    if frozen:
        instead = "Lightning leaves frozen weights as your module makes them, float32 if it does not say"
    keys = {"trainer.precision": LIGHTNING_PRECISION[value]}
    return request.keys("precision", keys, instead, may_not_fit=frozen)


def _micro_batch(request: Request) -> ToolKeys:
    why = "Lightning takes the batches of your data module; give it this batch_size"
    return request.keys("micro_batch_size", {}, why, may_not_fit=True)


TOOL = Tool(
    name="lightning",
    title="Lightning",
    versions=("2.6.6",),
    run="python YOUR_CLI.py fit --config lightning.yaml",
    refuse=batches_fit,
    fixed=lambda request: {
        "trainer.accelerator": "cpu" if request.source.device == "cpu" else "gpu",
        "trainer.devices": 1,
        "trainer.max_epochs": 1,
        "trainer.gradient_clip_val": Hyperparameters().max_grad_norm,
    },
    without="Lightning's Trainer has no argument for it; your LightningModule has to do it",
    knobs={
        "precision": _precision,
        "micro_batch_size": _micro_batch,
        "gradient_accumulation_steps": value_of("gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
    },
)
