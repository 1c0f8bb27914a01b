"""How the user and the model want data to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.core.task import IGNORED_LABEL as IGNORED_LABEL
from autofit.core.workload import LEARNT, check_learn


@dataclass(frozen=True)
class LabelRule:
    """The model's classes.

    Attributes:
        classes: how many there are; 1: labels are measured values (regression), None: not known.
        names: of the classes, used when all names of a file are among them.
        strict: a name that is not among `names` is an error, as in evaluation data.
    """

    classes: int | None = None
    names: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel, or of all, of values from 0 to 1."""

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class DataOptions:
    """How a file is read.

    Attributes:
        packing: put samples one after the other and cut them to the sequence length, or pad each;
            None: pack plain text, pad all else.
        apart: packed samples do not see one another.
        progress: show a bar on stderr.
    """

    packing: bool | None = None
    apart: bool = False
    learn: str = LEARNT[0]
    labels: LabelRule = field(default_factory=LabelRule)
    normalisation: Normalisation = field(default_factory=Normalisation)
    progress: bool = False

    def __post_init__(self) -> None:
        check_learn(self.learn)
