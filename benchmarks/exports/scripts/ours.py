"""Our own run: three steps of the weights in a directory, on samples that are one effective batch."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from datasets import load_from_disk

from autofit.core.learning_rates import default_hyperparameters
from autofit.hardware.device import detect
from autofit.models import workload_from_source
from autofit.training.build import build
from autofit.training.step import train_step

case = json.loads(Path(sys.argv[1]).read_text())
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
workload = workload_from_source(case["source"], case["workload"])
model = transformers.AutoModelForCausalLM.from_pretrained(
    case["source"]["path"], dtype=torch.float32
)
model.config.use_cache = False
setup = build(
    workload,
    case["config"],
    detect("cpu").of_several(world),
    hyperparameters=default_hyperparameters(case["config"]),
    model=model,
)
del model
columns = load_from_disk(case["data"]).with_format("torch")[:]
own = slice(setup.ranks.dp_rank, None, setup.ranks.layout.dp_degree)
batch = {name: columns[name][own] for name in ("input_ids", "labels")}
for _ in range(case["steps"]):
    train_step(setup, batch)
setup.close()
if world > 1:
    dist.destroy_process_group()
