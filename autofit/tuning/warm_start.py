"""Earlier measurements of a workload on this machine: a search starts from them and adds its own.

Trouble with the store never fails a search: it is noted once, and the search goes on without the
store.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from autofit import techniques
from autofit.core.config import Config
from autofit.core.environment import SETTINGS
from autofit.core.errors import InputError, StoreError, pluralize
from autofit.core.events import Notify
from autofit.core.hardware import GIB, Hardware
from autofit.core.measurement import Measurement
from autofit.core.workload import Workload
from autofit.search.prior_measurements import PriorMeasurement, prior_measurement
from autofit.training.fingerprint import cache_key, own_code
from autofit.tuning.measurement_store import Store, Stored, Subject

# The rooms that decide what is measured: the probe's, and all that it may import.
MEASURING = ("core", "data", "distributed", "hardware", "probe", "setup", "techniques", "training")
_NO_INFLUENCE = ("python", "optuna")  # versions of what takes no part in a training step


def subject_of(
    workload: Workload, hardware: Hardware, versions: Mapping[str, str], predicted_links: str = ""
) -> Subject | None:
    """What measurements of this workload on this machine are stored under.

    None for a workload without a fingerprint.

    Args:
        hardware: the device that is measured on, not the one it stands for.
        predicted_links: what communication is predicted over where one rank stands for all.
    """
    fingerprint = workload.traits.fingerprint if workload.traits else None
    if fingerprint is None:
        return None

    rooms: tuple[str, ...] = MEASURING
    if predicted_links:
        rooms = (*MEASURING, "estimate")
    key = cache_key(
        fingerprint,
        device=hardware.device,
        name=hardware.name,
        memory_gib=round(hardware.memory_bytes / GIB),  # the last bytes change with the kernel
        capability=hardware.capability,
        cores=hardware.cores,
        devices=[hardware.devices, hardware.nodes, predicted_links],
        allocator=hardware.allocator,
        environment={name: os.environ.get(name, default) for name, default in SETTINGS.items()},
        versions={name: version for name, version in versions.items() if name not in _NO_INFLUENCE},
        code=own_code(*rooms),
    )
    return Subject(key, fingerprint)


class WarmStart:
    """The stored measurements of a subject, for one search to read and add to.

    Args:
        subject: None to read and add nothing.
        cap_bytes: what tensors may take.
        exact: whether the peak of tensors alone decides what fits, and repeats exactly (on a CPU).
        run: the run directory of the search.
        notify: hears what the user should know.
        hardware: the device that is measured on.
    """

    def __init__(
        self,
        subject: Subject | None,
        cap_bytes: int,
        *,
        exact: bool,
        run: Path,
        notify: Notify,
        hardware: Hardware,
    ) -> None:
        self._subject = subject
        self._cap_bytes = cap_bytes
        self._exact = exact
        # No database takes the bytes that are no text in names of files.
        self._run = str(run).encode(errors="backslashreplace").decode()
        self._session = uuid.uuid4().hex
        self._notify = notify
        self._hardware = hardware
        self._store = Store()

    def prior_measurements(self, *, resumed: bool) -> tuple[PriorMeasurement, ...]:
        """What earlier searches say within this budget.

        Args:
            resumed: whether to leave out this run's own measurements, which its journal has.
        """
        if self._subject is None:
            return ()

        try:
            stored = self._store.find(self._subject)
        except StoreError as error:
            self._do_without(error)
            return ()

        sessions: dict[str, int] = {}
        measurements = []
        for row in stored:
            is_its_own = resumed and row.run == self._run
            if is_its_own or not self._is_known(row.measurement.config):
                continue

            session = sessions.setdefault(row.session, len(sessions) + 1)
            prior = prior_measurement(
                row.measurement, session, then=row.cap_bytes, now=self._cap_bytes, exact=self._exact
            )
            if prior:
                measurements.append(prior)

        if measurements:
            configs = pluralize(len({prior.config for prior in measurements}), "config")
            self._notify(
                f"earlier searches measured {configs}: they tell where to start "
                "(--no-store leaves them out)"
            )
        return tuple(measurements)

    def _is_known(self, config: Config) -> bool:
        """Whether a config has knobs and values of this autofit; rows are data, and may say
        anything."""
        try:
            techniques.check(config, self._hardware)
        except InputError:
            return False
        return True

    def add(self, measurement: Measurement) -> None:
        """Store a measurement for later searches."""
        if self._subject is None:
            return

        row = Stored(measurement, self._cap_bytes, self._run, self._session)
        try:
            self._store.add(self._subject, row)
        except StoreError as error:
            self._do_without(error)

    def _do_without(self, error: StoreError) -> None:
        self._subject = None
        self._notify(f"the search goes on without earlier measurements: {error}")
