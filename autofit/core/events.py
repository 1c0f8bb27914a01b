"""What happens during a search, as data: tune says it, the CLI shows it, nobody in between prints."""

from dataclasses import dataclass

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement


@dataclass(frozen=True)
class SearchStarted:
    """The space is known and the first probe is next.

    `space_size` is that of the Result, `refused` how many of it cannot be, `trials` the most probes; 0: all is
    predicted.
    """

    model: str
    hardware: Hardware
    budget: Budget
    space_size: int
    trials: int
    time_limit: float | None
    refused: int = 0


@dataclass(frozen=True)
class PhaseStarted:
    """The search turns to something that takes a while and is no probe; `doing` says what: "predicting 23 configs"."""

    doing: str


@dataclass(frozen=True)
class ProbeStarted:
    """A child process begins to measure a config; `verifying` when it is one of the finalists.

    `expected_bytes` is the peak predicted for it as the budget counts it, None where nothing is.
    """

    number: int
    config: Config
    verifying: bool = False
    expected_bytes: int | None = None


@dataclass(frozen=True)
class ProbeFinished:
    """A measurement came back; `best` is the fastest that fits so far."""

    measurement: Measurement
    best: Measurement | None


@dataclass(frozen=True)
class Note:
    """Something the user should know, in one sentence."""

    text: str


Event = SearchStarted | PhaseStarted | ProbeStarted | ProbeFinished | Note
