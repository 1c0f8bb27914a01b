"""A found config in a training loop of one's own, whose losses are those of `autofit.fit`.

Config, model and data are those of the example with Trainer. `autofit.prepare` builds the model as
the probes did; the loop decides on everything else: here a schedule, evaluation and a checkpoint.
"""

import tempfile
from pathlib import Path

import torch
from hf_trainer import CONFIG, LR, losses_of_autofit, make_loader, make_model, show

import autofit


def train(config: dict, steps: int, checkpoint: Path) -> list[float]:
    """The loss of every step."""
    model = make_model()
    loader = make_loader()
    losses = []

    with autofit.prepare(model, config, loader=loader, lr=LR, device="cpu") as step:
        schedule = torch.optim.lr_scheduler.ConstantLR(step.optimizer, factor=1.0)
        while len(losses) < steps:
            for batch in loader:
                losses.append(step(batch))  # micro-batches, accumulation, clipping, update
                schedule.step()
                if len(losses) == steps:
                    break

        print(f"held out: {step.evaluate([next(iter(loader))]):.4f}")
        torch.save(step.state_dict(), checkpoint)
    return losses


def main(config: dict = CONFIG, steps: int = 17) -> tuple[list[float], list[float]]:
    """Train in both loops, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        own = train(config, steps, Path(folder) / "state.pt")
    mine = losses_of_autofit(config, steps)
    show("own loop", mine, own)
    return mine, own


if __name__ == "__main__":
    main()
