"""What the scripts that some tools ask a user for have in common: the arguments, the model and its samples."""

import json
from pathlib import Path

import torch
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

GIVEN = json.loads(Path(__file__).with_name("given.json").read_text())


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    made = AutoModelForCausalLM.from_pretrained(GIVEN["weights"], dtype=dtype)
    made.config.use_cache = False  # which would keep keys and values through the step
    return made


def loader(**options: object) -> DataLoader:
    """Micro-batches of this process, in which each epoch is a step."""
    columns = load_from_disk(GIVEN["tokens"]).with_format("torch")
    return DataLoader(columns, batch_size=GIVEN["micro_batch_size"], **options)
