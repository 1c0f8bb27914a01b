"""What every knob adds to train.py. A new technique adds its lines here: one function and one row
of KNOBS.

A knob that is off is not asked, and adds nothing. `script` refuses a value without a row rather
than leave it out: the header's figures would be those of another run. activation_offload and
parameter_offload have no row, because what makes them fast is copies on a stream of their own,
which a few plain lines do not have.
"""

from collections.abc import Callable
from functools import partial

from autofit.export.fragments import Case, Fragments
from autofit.export.knobs.blocks import activation_checkpointing, attention, compiled, kernels
from autofit.export.knobs.lora import lora, lora_plus
from autofit.export.knobs.loss import loss
from autofit.export.knobs.optimizer import optimizer, optimizer_in_backward, optimizer_offload
from autofit.export.knobs.parallel import data_parallel, pipeline_parallel
from autofit.export.knobs.reference import reference
from autofit.export.knobs.weights import head_only, precision, quantization

# What the script's constants, or another knob's function, cover.
_ELSEWHERE = (
    *(
        "micro_batch_size",
        "gradient_accumulation_steps",
        "lora_targets",
        "lora_alpha",
        "lora_dropout",
    ),
    *("lora_dora", "lora_rslora"),
    *("data_parallel_replicate", "data_parallel_shard", "reshard_after_forward", "fsdp_offload"),
    "pipeline_schedule",
)


_WHOLE = ("tensor_parallel", "context_parallel")


def _whole(knob: str, case: Case) -> Fragments | None:
    """Nothing where it splits nothing; what else it does has no lines."""
    return Fragments() if case.config[knob] == 1 else None


# In the order in which their lines follow each other.
KNOBS: dict[str, Callable[[Case], Fragments | None]] = {
    **dict.fromkeys(_ELSEWHERE, lambda case: Fragments()),
    "quantization": quantization,
    "precision": precision,
    "attention": attention,
    "kernels": kernels,  # before adapters wrap the model
    "lora_rank": lora,
    "head_only": head_only,
    "lora_plus": lora_plus,
    "activation_checkpointing": activation_checkpointing,
    "loss": loss,
    "reference": reference,
    "teacher_precision": lambda case: Fragments(),  # of what the task adds
    "optimizer": optimizer,
    "optimizer_offload": optimizer_offload,
    "optimizer_in_backward": optimizer_in_backward,
    "compile": compiled,
    "data_parallel": data_parallel,
    "pipeline_parallel": pipeline_parallel,
    **{knob: partial(_whole, knob) for knob in _WHOLE},
}
