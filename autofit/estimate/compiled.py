"""What compiled code keeps of the memory that the eager operations would take: a rule, since it cannot be traced."""

from __future__ import annotations

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload

# Where no rule is known: of activations and temporaries at the least half; of all at the most 15 % more (a
# convolutional network on the CPU; language models needed up to 27 % less).
LEAST, MOST = 0.5, 1.15
# By activation_checkpointing, the share of a transformer's eager activations that Inductor's code computes again: 0.17
# to 0.30 without, 0.18 alternate, 0.05 selective, 0.00 full or where they are offloaded, 0.08 beside int8 layers. Of
# Llama, Qwen2, GPT-2 and BERT, by what PyTorch 2.11's CUDA allocator gave them when rehearsed without kernels.
_COMPUTED_AGAIN = {"none": 0.23, "alternate": 0.18, "selective": 0.05, "full": 0.0}
_COMPUTED_AGAIN_INT8 = 0.08
UNSURE = 0.08  # either way


def computed_again(config: Config, workload: Workload, hardware: Hardware) -> float | None:
    """The share of its activations that a config's compiled code computes again in the backward instead of keeping.

    None where nothing is computed by compiled code, or where no rule is known for it.
    """
    known = hardware.device == "cuda" and workload.traits is not None and workload.traits.attention
    kind = str(config["activation_checkpointing"])
    if config["compile"] == "none" or not known or kind not in _COMPUTED_AGAIN:
        return None
    if config["activation_offload"] == "cpu":
        return 0.0
    share = _COMPUTED_AGAIN[kind]
    return min(share, _COMPUTED_AGAIN_INT8) if config["quantization"] == "int8" else share
