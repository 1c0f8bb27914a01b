"""transformers' own parser of TrainingArguments, YAML or JSON, on a machine without a GPU.

Keys of scripts, which they parse beside these, are passed over; what is DeepSpeed's, its own parser reads.
"""

import json
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments, training_args

training_args.is_torch_bf16_gpu_available = lambda: True


def parse(path, exported=True):
    text = Path(path).read_text()
    given = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    arguments = given.get("arguments", given)
    arguments.pop("deepspeed", None)
    HfArgumentParser(TrainingArguments).parse_dict(arguments, allow_extra_keys=not exported)
