"""What techniques are written against: the protocol, the stages, the Setup and the model's repeated blocks."""

from autofit.setup.setup import Setup
from autofit.setup.technique import Stage, Technique

__all__ = ["Setup", "Stage", "Technique"]
