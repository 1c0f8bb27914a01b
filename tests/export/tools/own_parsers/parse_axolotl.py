"""axolotl's own validation of a config, on a machine without a GPU.

Said in place of hardware: one Ampere card, or eight where the file divides over devices; and of ring_flash_attn, which
needs one, that it is there. Our check adds what axolotl drops in silence, keys and optimizers it does not know.
"""

import sys
from pathlib import Path
from types import ModuleType

import yaml
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig
from axolotl.utils.schemas.enums import CustomSupportedOptimizers
from transformers.training_args import OptimizerNames

sys.modules.setdefault("ring_flash_attn", ModuleType("ring_flash_attn"))

CARD = {
    "bf16": True,
    "tf32": True,
    "fp8": False,
    "n_gpu": 1,
    "n_node": 1,
    "compute_capability": "sm_80",
}
# of which each divides a training over devices
SEVERAL = (
    "fsdp_config",
    "deepspeed",
    "context_parallel_size",
    "tensor_parallel_size",
    "expert_parallel_size",
)


def parse(path, exported=True):
    given = yaml.safe_load(Path(path).read_text())
    config = DictDefault(given)
    PluginManager.get_instance().plugins.clear()  # of the file before
    prepare_plugins(config)
    several = {}
    if given.get("ddp") or any(given.get(key) for key in SEVERAL):
        several = {"n_gpu": 8}
    checked = validate_config(
        config, capabilities=CARD | several, env_capabilities={"torch_version": "2.13.0"}
    )
    if not exported:
        return
    known = set(AxolotlInputConfig.model_fields)
    if given.get("plugins"):
        from axolotl.integrations.config import merge_input_args

        known |= set(merge_input_args()[1].model_fields)
    assert set(given) <= known, f"our check: axolotl knows no {sorted(set(given) - known)}"
    optimizers = {each.value for each in (*CustomSupportedOptimizers, *OptimizerNames)}
    assert given["optimizer"] in optimizers, (
        f"our check: axolotl knows no optimizer {given['optimizer']}"
    )
    for name in (
        "learning_rate",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "sequence_len",
    ):
        assert checked[name] == given[name], (
            f"axolotl makes {checked[name]!r} of {name} {given[name]!r}"
        )
