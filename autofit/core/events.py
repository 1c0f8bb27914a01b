"""The events of a search, as data: tuning emits them, the CLI shows them, nothing in between prints."""

from collections.abc import Callable
from dataclasses import dataclass

from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement


@dataclass(frozen=True)
class SearchStarted:
    """The space is known and the first probe is next.

    `space_size` is that of the Result, `refused` how many of its configs are impossible, `trials` the most probes; 0
    where everything is predicted.
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
    """Something slow other than a probe begins; `doing` says what, as "predicting 23 configs"."""

    doing: str


@dataclass(frozen=True)
class ProbeStarted:
    """A child process begins to measure a config; `verifying` marks a finalist.

    `expected_bytes` is its predicted peak as the budget counts it, None without a prediction.
    """

    number: int
    config: Config
    verifying: bool = False
    expected_bytes: int | None = None


@dataclass(frozen=True)
class ProbeFinished:
    """A probe returned a measurement; `best` is the fastest that fits so far."""

    measurement: Measurement
    best: Measurement | None


@dataclass(frozen=True)
class Note:
    """Something the user should know, in one sentence."""

    text: str


Event = SearchStarted | PhaseStarted | ProbeStarted | ProbeFinished | Note
Listener = Callable[[Event], None]
