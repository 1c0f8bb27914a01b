"""litgpt's own command line. Our check adds precisions and classes of optimizers, which it takes as they come."""

import importlib
from pathlib import Path
from typing import get_args

import yaml
from jsonargparse import CLI, capture_parser
from lightning.fabric.connector import _PRECISION_INPUT_STR
from litgpt.__main__ import PARSER_DATA


def parse(path):
    given = yaml.safe_load(Path(path).read_text())
    command = "finetune_lora" if "lora_r" in given else "finetune_full"
    parser = capture_parser(lambda: CLI(PARSER_DATA))
    config = parser.parse_args([command, "--config", path])
    assert given["precision"] in get_args(_PRECISION_INPUT_STR), (
        f"our check: no precision {given['precision']}"
    )
    module, _, name = given["optimizer"]["class_path"].rpartition(".")
    assert hasattr(importlib.import_module(module), name), f"our check: no optimizer {name}"
    train = config[command]["train"]
    assert train["micro_batch_size"] == given["train"]["micro_batch_size"]
    assert train["global_batch_size"] == given["train"]["global_batch_size"]
