"""LLaMA-Factory's own parser of a config, on a machine without a GPU.

Said in place of hardware: that bfloat16 works, and one process of one; of a file of DeepSpeed's that people have
beside theirs, a small one. Our check adds types and choices, which it does not look at.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"DISABLE_VERSION_CHECK": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "lo"}

from llamafactory.hparams import parser
from transformers import HfArgumentParser, training_args

parser.is_torch_bf16_gpu_available = lambda: True
training_args.is_torch_bf16_gpu_available = lambda: True
DEEPSPEED = json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"})
NAMES = (
    "cutoff_len",
    "learning_rate",
    "disable_gradient_checkpointing",
    "pure_bf16",
    "quantization_bit",
)


def parse(path, exported=True):
    sys.argv[1:] = [path]
    given = dict(parser.read_args())
    config = given.get("deepspeed")
    if isinstance(config, str) and not Path(config).exists():
        given["deepspeed"] = DEEPSPEED
    model, data, training, finetuning, _ = parser.get_train_args(dict(given))
    words = [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    HfArgumentParser(parser._TRAIN_ARGS).parse_args_into_dataclasses(words)
    if not exported:
        return
    told = {**vars(model), **vars(data), **vars(training), **vars(finetuning)}
    for name in NAMES:
        assert told[name] == given[name], (
            f"LLaMA-Factory makes {told[name]!r} of {name} {given[name]!r}"
        )
