"""ms-swift's own parser of a config, on a machine without a GPU or a hub.

Said in place of a hub: a directory with the config of a small Llama, and a file for the data. Our check compares what
it makes of a few keys. A command is given as the YAML of its options, and its first line names it: `# swift pt`.
"""

import json
import os
import tempfile
from pathlib import Path

os.environ["USE_HF"] = "1"

import yaml
from swift.arguments import PretrainArguments, RLHFArguments, SftArguments
from swift.cli.main import parse_yaml_args
from swift.utils import parse_args
from transformers import LlamaConfig, training_args

training_args.is_torch_bf16_gpu_available = lambda: True

NAMES = ("max_length", "learning_rate", "gradient_checkpointing", "lora_rank", "quant_bits", "bf16")


def parse(path, exported=True):
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text(json.dumps({"messages": [{"role": "assistant", "content": "a"}]}) + "\n")
        weights = Path(folder) / "weights"
        LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(weights)

        text = Path(path).read_text()
        given = yaml.safe_load(text)
        stands = {"model": str(weights), "dataset": str(rows), "model_type": "llama"}
        if "teacher_model" in given:
            stands |= {"teacher_model": str(weights), "teacher_model_type": "llama"}
        file = Path(folder) / "given.yaml"
        file.write_text(
            yaml.safe_dump({**given, **stands, "output_dir": folder, "template": "default"})
        )

        words = [str(file)]
        parse_yaml_args(words)
        kind = RLHFArguments if "rlhf_type" in given else SftArguments
        if text.startswith("# swift pt"):
            kind = PretrainArguments
        told, further = parse_args(kind, words)
        assert not further, f"ms-swift does not know {further}"
        if not exported:
            return
        for name in NAMES:
            assert name not in given or getattr(told, name) == given[name], (
                f"ms-swift makes {getattr(told, name)!r} of {name} {given[name]!r}"
            )
