"""`tune validate` of torchtune, which looks at components alone. Our check adds the keys that its recipes read."""

import re
from pathlib import Path

import torchtune
from omegaconf import OmegaConf
from torchtune import config

RECIPES = Path(torchtune.__file__).parents[1] / "recipes"

READ = {
    "output_dir",
    "tokenizer",
    "dataset",
    "seed",
    "shuffle",
    "model",
    "checkpointer",
    "resume_from_checkpoint",
}
READ |= {
    "batch_size",
    "epochs",
    "optimizer",
    "loss",
    "max_steps_per_epoch",
    "gradient_accumulation_steps",
    "compile",
}
READ |= {
    "clip_grad_norm",
    "device",
    "dtype",
    "metric_logger",
    "log_every_n_steps",
    "log_peak_memory_stats",
    "profiler",
}
READ |= {"enable_activation_checkpointing", "enable_activation_offloading"}
DIVIDED = {
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "tensor_parallel_dim",
    "tensor_parallel_plan",
}
FULL, LORA = {"optimizer_in_bwd"}, {"lr_scheduler", "save_adapter_weights_only"}


def parse(path):
    given = OmegaConf.load(path)
    config.validate(given)
    adapters = ".lora_" in given.model._component_
    several = bool(DIVIDED & set(given))
    name = f"{'lora' if adapters else 'full'}_finetune_{'distributed' if several else 'single_device'}.py"
    recipe = (RECIPES / name).read_text()
    known = (
        READ | (LORA if adapters else FULL) | {each for each in DIVIDED if f'"{each}"' in recipe}
    )
    unknown = set(given) - known
    assert not unknown, f"our check: the recipe reads no {sorted(unknown)}"
    missing = (
        set(re.findall(r"cfg\.([a-z_]+)\b(?!\()", recipe)) - set(given) - {"get", "lr_scheduler"}
    )
    assert not missing - {"profiler"}, f"our check: the recipe wants {sorted(missing)}"
