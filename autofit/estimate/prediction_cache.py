"""Predictions of whole spaces cached on disk, by what they depend on.

Only for models that a config.json describes: custom code may change without its structure showing it.
"""

import contextlib
import json
from collections.abc import Callable, Sequence

from autofit.core.config import Config
from autofit.core.environment import version_of
from autofit.core.files import cache_file, digest, write_cache
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.rates import Rates
from autofit.training.fingerprint import cache_key, own_code

Figures = tuple[list[float], list[float]]  # bytes and seconds, by config
_VERSIONS = ("autofit", "torch", "transformers", "peft", "bitsandbytes", "torchao", "flash-attn")


def key_of(workload: Workload, hardware: Hardware, rates: Rates, configs: Sequence[Config]) -> str | None:
    """Names the predictions of these configs; None for a model that is more than a config.json."""
    described = getattr(workload.model, "config", None)
    if described is None or not workload.source or workload.loss or workload.count or workload.optimizer:
        return None
    # Canonical configs all have the same knobs, in this order: hundreds of thousands take a second.
    values = "".join(repr(tuple(config.values())) for config in configs)
    return cache_key(
        [dict(described), workload.summary()],
        hardware=[hardware.device, hardware.capability, hardware.here],
        rates=[sorted(rates.matmul.items()), rates.bandwidth, rates.link, rates.launch_seconds, rates.pass_seconds],
        versions=[version_of(package) for package in _VERSIONS],
        code=own_code(),
        configs=[[list(config) for config in configs[:1]], digest(values)],
    )


def cached(key: str | None, predict: Callable[[], Figures]) -> Figures:
    """The (bytes, seconds) cached under a key; predicted where there are none, and cached if there is a key."""
    path = cache_file("estimates", f"{key}.json")
    if key:
        with contextlib.suppress(OSError, ValueError):  # none yet, or truncated
            nbytes, seconds = json.loads(path.read_text(encoding="utf-8"))
            return nbytes, seconds
    figures = predict()
    if key:
        write_cache(path, json.dumps(figures))
    return figures
