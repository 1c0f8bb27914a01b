"""A knob of one's own: the order in which the numbers of an image lie in memory.

PyTorch keeps images as [sample, channel, row, column]; some convolutions are faster when the channels of a pixel lie
side by side ("channels last"). Whether this network's are, on this machine, is what a search is for. Also from the
command line:

    autofit search --model examples/own_technique.py:workload --device cpu --mem 1 \\
        --set memory_format=contiguous,channels_last --set precision=fp32 --trials 8
"""

import torch
from torch import Tensor, nn

import autofit

CLASSES, SIZE, WIDTH = 10, 16, 32


class MemoryFormat(autofit.Technique):
    """`channels_last` for the weights of convolutions and for the images that enter the model."""

    name = "memory_format"
    # weights exist by now; the optimizer, which comes at STEP, sees the final ones
    stage = autofit.Stage.BLOCKS
    off = "contiguous"
    values = ("contiguous", "channels_last")

    def exact(self, value: object, workload: autofit.Workload) -> bool:
        return True  # the same sums, up to rounding

    # never called with the value that is off
    def apply(self, setup: autofit.Setup, value: object) -> None:
        setup.model.to(memory_format=torch.channels_last)
        hook = setup.model.register_forward_pre_hook(_to_channels_last)
        setup.on_close(hook.remove)  # the user gets the model back without it


def _to_channels_last(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs
    )


# where the file is imported, so that every way to start a search knows the knob
autofit.register(MemoryFormat())


def block() -> nn.Module:
    """GroupNorm takes each sample by itself: unlike BatchNorm's, its mathematics does not depend on micro-batches."""
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(8, WIDTH), nn.ReLU())


def make_model() -> nn.Module:
    """Images [n, 3, 16, 16] to the scores of 10 classes."""
    stem, blocks = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Sequential(*(block() for _ in range(4)))
    return nn.Sequential(
        stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES)
    )


def make_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Random images and classes: only their shapes matter to memory and speed."""
    return torch.randn(samples, 3, SIZE, SIZE), torch.randint(CLASSES, (samples,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the samples."""
    images, classes = batch
    return nn.functional.cross_entropy(model(images), classes)


def workload() -> autofit.Workload:
    """What the command line asks for."""
    return autofit.Workload(
        model=make_model, batch=make_batch, loss=loss, effective_batch_size=32, name="convnet"
    )


def main(trials: int = 4) -> autofit.Result:
    """Search the knob together with the micro-batch size: four configs, and all of them are tried."""
    fixed = {
        "precision": "fp32",
        "activation_checkpointing": "none",
        "optimizer": "adamw",
        "optimizer_in_backward": False,
    }
    searched = {"memory_format": ["contiguous", "channels_last"], "micro_batch_size": [16, 32]}
    result = autofit.search(
        workload(), device="cpu", mem=1, set={**fixed, **searched}, trials=trials
    )
    print(autofit.explain(result))
    for trial in result.trials:
        speed, config = f"{trial.samples_per_second:6.0f} samples/s", trial.config
        print(f"{speed}  {config['memory_format']:13}  micro-batch {config['micro_batch_size']}")
    return result


if __name__ == "__main__":
    main()
