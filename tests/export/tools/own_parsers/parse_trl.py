"""TRL's own parser of a config, on a machine without a GPU.

A command is given as the YAML of its options, and its first line names it: `# trl dpo`; a file without one is for
`trl sft --config`. What TRL does not know is for accelerate, whose parser reads it.
"""

import importlib
import json
import re
import warnings
from pathlib import Path

import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import training_args
from trl import get_peft_config, get_quantization_config

training_args.is_torch_bf16_gpu_available = lambda: True

TITLE = re.compile(r"# trl (\w+)\n")


def words_of(text):
    """The options of a command."""
    words = []
    for name, value in yaml.safe_load(text).items():
        several = value if isinstance(value, list) else [value]
        written = [json.dumps(one) if isinstance(one, dict) else str(one) for one in several]
        words += [f"--{name}", *written]
    return words


def parse(path, exported=True):
    text = Path(path).read_text()
    stage = "sft"
    words = ["--config", str(path)]
    if command := TITLE.match(text):
        stage = command[1]
        words = words_of(text)

    parser = importlib.import_module(f"trl.scripts.{stage}").make_parser(prog=f"trl {stage}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TRL says of Liger's kernels
        _, _, model, *_, left = parser.parse_args_and_config(words, return_remaining_strings=True)

    get_peft_config(model)
    get_quantization_config(model)
    # As `trl` itself takes it out, before accelerate reads the rest.
    if "--accelerate_config" in left:
        at = left.index("--accelerate_config")
        del left[at : at + 2]
    launch_command_parser().parse_args([*left, "script.py"])
