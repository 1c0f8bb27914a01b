"""The main figures of many configs, kept on disk: `predict_all`."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autofit.core.config import Config
from autofit.core.environment import version_of
from autofit.core.files import cache_file, digest, read_cache, write_cache
from autofit.core.forks import forked
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.operators import MEASURING_SECONDS
from autofit.estimate.processes import Workers
from autofit.estimate.rates import UNKNOWN, Rates, rates_for
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.hardware.catalogue import links_of
from autofit.training.fingerprint import cache_key, described, own_code

Figures = tuple[list[float], list[float]]  # bytes and seconds, by config
HOST_TOO_SMALL = 2.0**60  # in the place of a config's bytes
_VERSIONS = (
    "autofit",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "torchao",
    "flash-attn",
)


class SpacePredictor:
    """Bytes of tensors and seconds of a step of a space's configs, a few at a time.

    NaN where nothing can be predicted, and HOST_TOO_SMALL bytes where the host would hold more than
    `host_bytes`. Cached on disk by workload, device, configs and versions where a config.json
    describes all of the model: custom code may change without its structure showing it.

    Args:
        configs: of every micro-batch, rank and layout that will be asked for.
        measuring, within, workers, notify: as of SpaceEstimator.
    """

    def __init__(
        self,
        workload: Workload,
        hardware: Hardware,
        configs: Sequence[Config],
        *,
        measuring: float = MEASURING_SECONDS,
        within: float = math.inf,
        workers: Workers | None = None,
        host_bytes: float = math.inf,
        notify: Callable[[int], None] = lambda left: None,
    ) -> None:
        self._workload = workload
        self._hardware = hardware
        self._host_bytes = host_bytes
        # A search with more time should know more.
        self._writes = measuring >= MEASURING_SECONDS

        # Measured in a fork where this process is still to be forked: matrix products start
        # threads.
        are_forked = workers is not None and workers.are_forked
        rates = forked(lambda: rates_for(hardware))() if are_forked else rates_for(hardware)
        self._rates = rates or UNKNOWN

        self._estimator = functools.cache(
            lambda: SpaceEstimator(
                workload,
                hardware,
                self._rates,
                configs,
                measuring=measuring,
                within=within,
                workers=workers,
                notify=notify,
            )
        )

    def trace_until(self, end: float) -> None:
        """Set until when more may be traced, by `time.monotonic`."""
        self._estimator().trace_until(end)

    def __call__(self, configs: Sequence[Config]) -> Figures:
        """The figures of some configs; raises UntraceableError where the model cannot be traced."""
        key = cache_key_of(self._workload, self._hardware, self._rates, configs)
        path = cache_file("estimates", f"{key}.json")
        found = _known(path, len(configs)) if key else None
        if found:
            return _within_host(found, self._host_bytes)

        estimator = self._estimator()
        predictions = estimator.predict(configs)
        allocated = predictions.allocated + workspace_bytes(self._hardware)
        arrays = (allocated, predictions.seconds, predictions.on_host)
        figures = [array.tolist() for array in arrays]
        if key and self._writes and estimator.complete:
            write_cache(path, figures)

        return _within_host(figures, self._host_bytes)


def predict_all(
    workload: Workload,
    hardware: Hardware,
    configs: Sequence[Config],
    *,
    processes: int | None = 1,
    **options: Any,
) -> Figures:
    """The figures of configs that are predicted together; `processes` as of Workers, `options` as
    of SpacePredictor."""
    workers = Workers(processes)
    predict = SpacePredictor(workload, hardware, configs, workers=workers, **options)
    try:
        return predict(configs)
    finally:
        workers.close()


def _known(path: Path, configs: int) -> list[list[float]] | None:
    """The figures of so many configs in a file of the cache; None where it holds something else."""
    try:
        figures = np.array(read_cache(path, Any), float)
    except (TypeError, ValueError):
        return None

    if figures.shape != (3, configs):
        return None

    known: list[list[float]] = figures.tolist()

    return known


def _within_host(figures: Sequence[list[float]], most: float) -> Figures:
    nbytes, seconds, on_host = figures
    sizes = zip(nbytes, on_host, strict=True)
    limited = [HOST_TOO_SMALL if held > most else size for size, held in sizes]

    return limited, seconds


def cache_key_of(
    workload: Workload,
    hardware: Hardware,
    rates: Rates,
    configs: Sequence[Config],
) -> str | None:
    """Names the predictions of these configs; None for a model that is more than a config.json."""
    config = described(workload.model)
    if (
        config is None
        or not workload.source
        or workload.loss
        or workload.count
        or workload.split
        or workload.optimizer
    ):
        return None

    # Canonical configs all have the same knobs, in this order: hundreds of thousands take a second.
    values = "".join(repr(tuple(config.values())) for config in configs)

    return cache_key(
        [config, workload.summary()],
        hardware=[hardware.device, hardware.capability, hardware.here],
        devices=[
            hardware.devices,
            hardware.nodes,
            str(links_of(hardware)) if hardware.world > 1 else None,
        ],
        rates=[
            sorted(rates.matmul.items()),
            rates.bandwidth,
            rates.link,
            rates.launch_seconds,
            rates.pass_seconds,
        ],
        versions=[version_of(package) for package in _VERSIONS],
        code=own_code(),
        configs=[[list(config) for config in configs[:1]], digest(values)],
    )
