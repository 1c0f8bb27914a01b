"""What a process that trains runs under: environment variables, in the emitted train.py too; and what is left out of
its log."""

import logging
import os
from collections.abc import Mapping, MutableMapping

# Where segments of memory cannot grow, 8B QLoRA reserves 3.8 % more, of a margin of 5 %.
EXPANDABLE, FIXED = "expandable_segments:True", "expandable_segments:False"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLDER_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # which PyTorch reads where that is not set
# By default the threads of OpenMP spin while they wait: beside busy processes on two cores that made a step up to 18
# times slower (10.2 s against 0.57 s). Read when torch is loaded, as is the setting of the allocator.
SETTINGS = {ALLOCATOR: EXPANDABLE, "OMP_WAIT_POLICY": "PASSIVE"}

# What packages log when they are imported on a machine without the card that their kernels are for.
_NOT_TO_ACT_ON = {
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set, by whichever name."""
    for name, value in SETTINGS.items():
        if name != ALLOCATOR or allocator_variable(environment) is None:
            environment.setdefault(name, value)


def allocator_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable that sets PyTorch's allocator; None where none does."""
    return next((name for name in (ALLOCATOR, *_OLDER_NAMES) if name in environment), None)


def quiet_imports() -> None:
    """From here on, leave out what packages log when they are imported and nobody can act on."""
    for logger in _NOT_TO_ACT_ON:
        logging.getLogger(logger).addFilter(_worth_telling)


def _worth_telling(record: logging.LogRecord) -> bool:
    return _NOT_TO_ACT_ON[record.name] not in record.getMessage()
