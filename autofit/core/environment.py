"""Environment variables that training runs under: in probes, in `autofit train`, and in the emitted train.py."""

import os
from collections.abc import MutableMapping

# By default the threads of OpenMP spin while they wait: beside busy processes on two cores that made a step up to 18
# times slower (10.2 s against 0.57 s). Read when torch is loaded, as is the setting of the allocator.
SETTINGS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_WAIT_POLICY": "PASSIVE"}


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set."""
    for name, value in SETTINGS.items():
        environment.setdefault(name, value)
