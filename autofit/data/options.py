"""How the user and the model want data to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autofit.core.task import IGNORED_LABEL as IGNORED_LABEL
from autofit.core.workload import LEARNT, check_learn


@dataclass(frozen=True)
class LabelRule:
    """The model's classes."""

    classes: int | None = (
        None  # 1 means that labels are measured values (regression), None that it is not known
    )
    # used when all names of a file are among them
    names: Mapping[str, int] = field(default_factory=dict)
    strict: bool = False  # names that are not among `names` are an error, as in evaluation data


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel, or of all, of values from 0 to 1."""

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class DataOptions:
    """How a file is read."""

    # Put samples one after the other, cut to the sequence length, or pad each; None: pack plain text, pad all else.
    packing: bool | None = None
    apart: bool = False  # packed samples do not see one another
    learn: str = LEARNT[0]
    labels: LabelRule = field(default_factory=LabelRule)
    normalisation: Normalisation = field(default_factory=Normalisation)
    progress: bool = False  # show a bar on stderr

    def __post_init__(self) -> None:
        check_learn(self.learn)
