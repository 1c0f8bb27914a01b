"""The events of a search, as data: tuning emits them, the CLI shows them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autofit.core.budget import Budget
from autofit.core.config import Config, Value
from autofit.core.hardware import Hardware
from autofit.core.measurement import Measurement


@dataclass(frozen=True)
class SearchStarted:
    """The space is known and the first probe is next."""

    model: str
    hardware: Hardware
    budget: Budget
    space_size: int
    trials: int  # the most probes; 0 where everything is predicted
    time_limit: float | None
    refused: int = 0  # how many configs of the space are impossible


@dataclass(frozen=True)
class PhaseStarted:
    """Something slow other than a probe begins; `doing` says what, as "predicting 23 configs"."""

    doing: str


@dataclass(frozen=True)
class PhaseProgressed:
    """How far the phase has come that began last.

    Attributes:
        share: of its work, from 0 to 1, as far as that is known.
        seconds_left: None where nothing is known yet.
        config: the best so far, with its predicted speed; None where nothing fits yet.
    """

    share: float
    seconds_left: float | None
    config: Mapping[str, Value] | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class ProbeStarted:
    """A child process begins to measure a config."""

    number: int
    config: Config
    verifying: bool = False  # it is a finalist
    expected_bytes: int | None = None  # its predicted peak as the budget counts it


@dataclass(frozen=True)
class ProbeFinished:
    """A probe returned a measurement; `best` is the fastest that fits so far."""

    measurement: Measurement
    best: Measurement | None


@dataclass(frozen=True)
class Note:
    """Something the user should know, in one sentence."""

    text: str


Event = SearchStarted | PhaseStarted | PhaseProgressed | ProbeStarted | ProbeFinished | Note
Listener = Callable[[Event], None]
Notify = Callable[[str], None]  # hears a sentence that the user should know
