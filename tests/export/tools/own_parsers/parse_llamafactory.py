"""LLaMA-Factory's own parser of a config, on a machine without a GPU.

Said in place of hardware: that bfloat16 works, and one process of one. Our check adds types and choices, which it does
not look at.
"""

import os
import sys

os.environ |= {"DISABLE_VERSION_CHECK": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "lo"}

from llamafactory.hparams import parser
from transformers import HfArgumentParser

parser.is_torch_bf16_gpu_available = lambda: True
NAMES = (
    "cutoff_len",
    "learning_rate",
    "disable_gradient_checkpointing",
    "pure_bf16",
    "quantization_bit",
)


def parse(path):
    sys.argv[1:] = [path]
    given = parser.read_args()
    model, data, training, finetuning, _ = parser.get_train_args(dict(given))
    words = [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name}", str(value))
    ]
    HfArgumentParser(parser._TRAIN_ARGS).parse_args_into_dataclasses(words)
    told = {**vars(model), **vars(data), **vars(training), **vars(finetuning)}
    for name in NAMES:
        assert told[name] == given[name], (
            f"LLaMA-Factory makes {told[name]!r} of {name} {given[name]!r}"
        )
