"""Files for `accelerate launch` that tools publish beside their examples.

People keep the names of these and rarely keep the files beside the command that names them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.export.importers.document import flat

# By the end of their path: what each says of dividing a training, as ms-swift 4.6 publishes it.
_FILES: Mapping[str, Mapping[str, Any]] = {
    "multi-gpu/fsdp2_lora/fsdp2.json": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": True,
            "fsdp_version": 2,
        },
        "num_machines": 1,
        "num_processes": 2,
    },
    "multi-gpu/fsdp_qlora/fsdp_offload.json": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_offload_params": True,
            "fsdp_sharding_strategy": "FULL_SHARD",
        },
        "num_machines": 1,
        "num_processes": 2,
    },
    "multi-node/accelerate/multi_node.yaml": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "gradient_accumulation_steps": 16,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero_stage": 3,
        },
        "num_machines": 2,
        "num_processes": 8,
    },
}


def published(path: Path) -> Mapping[str, Any] | None:
    """The keys of the published file of that name; None where there is none."""
    for ending, keys in _FILES.items():
        if path.as_posix().endswith(f"/{ending}"):
            return flat(keys)
    return None
