"""A found config in a LightningModule, whose losses are those of `autofit.fit`.

Lightning calls `training_step`, logs, and counts epochs. With manual optimization it leaves the
optimizer step to the module, which leaves it to `autofit.prepare`.
"""

import logging
import warnings

import pytorch_lightning as pl
import torch
from hf_trainer import CONFIG, LR, losses_of_autofit, make_loader, make_model, show

import autofit


class LanguageModel(pl.LightningModule):
    """Trains a model as a config says."""

    def __init__(self, config: dict, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps
        self.losses = []
        self.model = make_model()
        self.step = autofit.prepare(self.model, config, loader=make_loader(), lr=LR, device="cpu")

    def configure_optimizers(self) -> None:
        """The step has its optimizer."""

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        """One optimizer step on one effective batch."""
        loss = self.step(batch)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss)
        self.trainer.should_stop = len(self.losses) == self.steps


def losses_of_lightning(config: dict, steps: int) -> list[float]:
    """The loss of every step under Lightning's Trainer."""
    module = LanguageModel(config, steps)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers for the loader, and of evaluation
        trainer.fit(module, make_loader())
    module.step.close()
    return module.losses


def main(config: dict = CONFIG, steps: int = 17) -> tuple[list[float], list[float]]:
    """Train in both loops, and compare."""
    mine = losses_of_autofit(config, steps)
    theirs = losses_of_lightning(config, steps)
    show("lightning", mine, theirs)
    return mine, theirs


if __name__ == "__main__":
    main()
