"""Timeline: the memory of one training step, moment by moment, as it is predicted. Data only.

The estimator makes it where torch is; a record keeps it, so that a report can be drawn again without the model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from autofit.core.config import Config

KINDS = ("parameters", "optimizer", "gradients", "activations", "temporary")  # in the order in which they are stacked


@dataclass(frozen=True)
class Timeline:
    """What lives at moments of one training step of a Config, by following the step on tensors without storage.

    Attributes:
        moments: bytes by KINDS. Of each stretch of the step the fullest moment, so that the peak is one of them.
        at: when each of them is, from 0 to 1: as a share of the predicted time of the step where the device's speed is
            known, else of the allocations and frees.
        phases: (name, when it begins): forward, backward, update.
        timed: whether `at` is of time.
        peak_bytes: the most that lives at any time of a run, what is counted before the step begins too.
        peak_phase: the phase of that.
        micro_batches: how many there are in a step; the last of them is what is shown, with the update.
    """

    config: Config
    moments: tuple[tuple[int, ...], ...]
    at: tuple[float, ...]
    phases: tuple[tuple[str, float], ...]
    timed: bool
    peak_bytes: int
    peak_phase: str
    micro_batches: int = 1

    @property
    def fullest(self) -> int:
        """The place of the fullest moment."""
        return max(range(len(self.moments)), key=lambda place: sum(self.moments[place]))

    def to_dict(self) -> dict[str, Any]:
        """As a record keeps it."""
        return {**dataclasses.asdict(dataclasses.replace(self, config=Config())), "config": dict(self.config)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        """The inverse of `to_dict`."""
        return cls(
            **{
                **data,
                "config": Config(data["config"]),
                "moments": tuple(tuple(moment) for moment in data["moments"]),
                "at": tuple(data["at"]),
                "phases": tuple((name, when) for name, when in data["phases"]),
            }
        )
