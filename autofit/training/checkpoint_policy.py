"""Where and how often a run is saved, and what it remembers of memory that ran out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.core.errors import InputError, is_whole, require
from autofit.core.files import write_atomically
from autofit.core.hardware import Hardware
from autofit.core.strict_yaml import dump, load_mapping
from autofit.core.workload import check_counts
from autofit.techniques import check
from autofit.training.oom_recovery import FALLBACK_KNOBS

_BATCH_SPLIT_FILE = "after-out-of-memory.yaml"


@dataclass(frozen=True)
class CheckpointPolicy:
    """Where a run is saved (None: nowhere), and whether it goes on from there.

    Checkpoints are made every so many steps, of which the last `keep_last` are retained.
    """

    directory: Path | None = None
    resume: bool = False
    checkpoint_every: int = 200
    keep_last: int = 2

    def __post_init__(self) -> None:
        check_counts(checkpoint_every=self.checkpoint_every, keep_last=self.keep_last)

    def batch_split(self, hardware: Hardware) -> dict[str, Any]:
        """The knobs that a run changed when it ran out of memory; empty where it never did.

        Raises InputError for a file that no training wrote.
        """
        if not self.resume or self.directory is None:
            return {}
        path = self.directory / _BATCH_SPLIT_FILE
        if not path.exists():
            return {}

        saved = load_mapping(path)
        try:
            is_complete = saved.keys() == set(FALLBACK_KNOBS)
            require(is_complete, "its knobs must be those that a run may change", list(saved))
            is_number = is_whole(saved["micro_batch_size"], 1)
            require(is_number, "its micro_batch_size must be a number", saved)
            check(saved, hardware)
        except InputError as error:
            raise InputError(
                f"{path} is not as a training writes it: {error.message}", "Delete it."
            ) from error
        return saved

    def save_batch_split(self, config: Mapping[str, Any]) -> None:
        """Save what `Recovery` may change, so that a resumed run does not run out again."""
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / _BATCH_SPLIT_FILE
            write_atomically(path, dump(batch_split_of(config)))


def batch_split_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a config that may change when memory runs out."""
    return {knob: config[knob] for knob in FALLBACK_KNOBS}


def describe_batch_split(config: Mapping[str, Any]) -> str:
    """The same knobs, as a sentence names them."""
    return ", ".join(f"{knob} {value}" for knob, value in batch_split_of(config).items())
