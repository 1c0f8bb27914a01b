"""The command line that Lightning's config is given to: a module and its data."""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from samples import loader, model


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.accumulate_grad_batches == 1:  # as the export says it
            self.optimizers().zero_grad()

    def train_dataloader(self):
        return loader()


LightningCLI(Module, save_config_callback=None)
