"""What techniques are written against: the protocol, the Setup they change, and the nouns they
decide by."""

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup.state import Setup
from autofit.setup.technique import Stage, Technique

__all__ = [
    "Config",
    "Hardware",
    "InputError",
    "RefusedError",
    "Setup",
    "Stage",
    "Technique",
    "Value",
    "Workload",
]
