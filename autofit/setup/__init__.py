"""What techniques are written against: the protocol, the stages, the Setup and the model's repeated blocks."""

from autofit.setup.state import Setup, Slices
from autofit.setup.technique import Stage, Technique

__all__ = ["Setup", "Slices", "Stage", "Technique"]
