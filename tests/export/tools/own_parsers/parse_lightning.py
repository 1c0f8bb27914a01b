"""Lightning's own command line, with a module and data that ship with it."""

from pathlib import Path

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


def parse(path):
    given = yaml.safe_load(Path(path).read_text())
    given["trainer"] |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Trainer, "trainer")
    # for several devices, of which none are here
    told = parser.parse_object({"trainer": given["trainer"]})
    assert told.trainer.devices == given["trainer"].pop("devices")
    given["trainer"].pop("strategy", None)
    here = Path(path).with_name("here.yaml")
    here.write_text(yaml.safe_dump(given))
    made = LightningCLI(BoringModel, BoringDataModule, run=False, args=["--config", str(here)])
    assert made.trainer.accumulate_grad_batches == given["trainer"]["accumulate_grad_batches"]
    assert made.trainer.precision == given["trainer"]["precision"]
