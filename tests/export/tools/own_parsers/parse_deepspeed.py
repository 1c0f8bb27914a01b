"""DeepSpeed's own reading of a config. Our check adds keys at the top, which DeepSpeed drops in silence."""

import json
from pathlib import Path

from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig

KNOWN = {
    value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)
}


def parse(path):
    given = json.loads(Path(path).read_text())
    config = DeepSpeedConfig(path)
    unknown = set(given) - KNOWN - {"_comment", "zero_optimization", "tensor_parallel"}
    assert not unknown, f"our check: DeepSpeed knows no {sorted(unknown)}"
    assert config.train_micro_batch_size_per_gpu == given["train_micro_batch_size_per_gpu"]
    assert config.gradient_accumulation_steps == given["gradient_accumulation_steps"]
    layers = given.get("tensor_parallel", {})
    assert config.tensor_parallel_config.autotp_size == layers.get("autotp_size", 0)
    assert config.bfloat16_config.enabled == given["bf16"]["enabled"]
