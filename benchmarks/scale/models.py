"""Seconds of `autofit estimate`, of models of 100, 1,000 and 5,000 layers.

Each runs in a process of its own, imports and the alternatives included, as people run it.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

LAYERS = (100, 1_000, 5_000)
MOST_TIMES = 3.0  # as long as the shallowest, the deepest may take

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}


def seconds_of(layers: int, *options: str) -> float:
    """Seconds of CPU that the estimate of a model of so many layers takes, with all processes."""
    with tempfile.TemporaryDirectory() as name:
        config = {**_CONFIG, "num_hidden_layers": layers}
        Path(name, "config.json").write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-m", "autofit", "estimate", "--model", name, "--gpu", "h100"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*command, "--json", *options], capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr.decode())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(layers: Sequence[int] = LAYERS) -> dict[str, float]:
    """Print, and return by the number of layers, the seconds of an estimate."""
    found = {}
    for number in layers:
        seconds = found[str(number)] = round(seconds_of(number), 1)
        times = seconds / found[str(layers[0])]
        print(f"{number:>6,} layers: {seconds:6.1f} s of CPU, {times:.2f} times", flush=True)
    if found[str(layers[-1])] > MOST_TIMES * found[str(layers[0])]:
        print(f"That is more than {MOST_TIMES:g} times as long.", flush=True)
    return found
