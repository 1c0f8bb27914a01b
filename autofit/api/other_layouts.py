"""The other ways to divide a training among its devices, beside that of a config."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autofit import techniques
from autofit.api.estimate import Prediction
from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.knobs import KNOBS
from autofit.core.knobs.data_parallel import KNOB as DATA
from autofit.core.knobs.fsdp_offload import KNOB as OF_SHARDS
from autofit.core.knobs.micro_batch_size import KNOB as MICRO_BATCH
from autofit.core.knobs.optimizer_offload import KNOB as OPTIMIZER
from autofit.core.knobs.parameter_offload import KNOB as PARAMETERS
from autofit.core.knobs.pipeline_parallel import KNOB as STAGES
from autofit.core.layout import largest_divisor, part_of
from autofit.hardware.catalogue import links_of

Way = Mapping[str, Value]  # the knobs that say it

_GATHERS = "it fetches all weights over that link for each micro-batch"
_PASSES = "its stages wait for one another"
_AVERAGES = "it averages all gradients over that link"
_FROM_HOST = "its weights come from the host"


def other_layouts(prediction: Prediction) -> Iterator[tuple[Way, Config]]:
    """Every device a stage, a shard, a shard whose weights rest on the host, or a replica: each
    that is possible, with its config; nothing on one device."""
    hardware = prediction.hardware
    workload = prediction.workload
    base = prediction.estimate.config
    ways: tuple[Way, ...] = (
        {STAGES.name: hardware.world},
        {DATA.name: "fsdp"},
        {DATA.name: "fsdp", OF_SHARDS.name: "cpu"},
        {DATA.name: "ddp"},
    )
    seen = {base}
    for way in ways if hardware.world > 1 else ():
        try:
            config = techniques.canonicalize(
                _divided(base, way, hardware.world, workload.effective_batch_size),
                workload,
                hardware,
            )
        except InputError:  # the batch is no multiple of the devices
            continue

        if config not in seen and techniques.refuse(config, workload, hardware) is None:
            seen.add(config)
            yield way, config


def _divided(base: Config, way: Way, world: int, effective_batch: int) -> dict[str, Value]:
    """A config divided in another way, with the largest micro-batch that is no larger."""
    knobs = dict(base)
    for name, knob in KNOBS.items():
        if knob.of_devices or knob.derived:
            knobs.pop(name, None)

    knobs |= way
    if way.get(DATA.name) == "fsdp":  # which moves weights and state by itself
        knobs |= {PARAMETERS.name: "none", OPTIMIZER.name: "none"}

    part = part_of(knobs, world, effective_batch)
    if part and base.micro_batch_size:
        knobs[MICRO_BATCH.name] = largest_divisor(part, base.micro_batch_size)

    return knobs


def which_wins(prediction: Prediction, layouts: Sequence[Mapping[str, Any]]) -> str | None:
    """The fastest layout that may fit, and why the next one is slower, in a sentence.

    Args:
        layouts: the other ones: their `knobs`, whether each `fits` and its `step_seconds`.
    """
    base = prediction.estimate
    own = {
        "knobs": _way_of(base.config),
        "fits": base.verdict,
        "step_seconds": base.step_seconds,
    }
    known = [each for each in (own, *layouts) if each["step_seconds"]]
    fitting = sorted(
        (each for each in known if each["fits"] != "no"),
        key=lambda each: float(each["step_seconds"]),
    )
    if not fitting or len(known) < 2:
        return None

    link = links_of(prediction.hardware).within.title
    best, *others = fitting
    if not others:
        return f"Over {link}, {_words(best['knobs'])} is the only one of these that may fit."

    ratio = others[0]["step_seconds"] / best["step_seconds"]
    return (
        f"Over {link}, {_words(best['knobs'])} is the fastest that may fit; "
        f"{_words(others[0]['knobs'])} takes {ratio:.2f} times as long: "
        f"{_why(others[0]['knobs'])}."
    )


def _way_of(config: Config) -> Way:
    """How a config divides its devices."""
    found: dict[str, Value] = {DATA.name: config.data_parallel}
    if config.pipeline_parallel not in (None, 1):
        found = {STAGES.name: config.pipeline_parallel}
    elif config.fsdp_offload == "cpu":
        found[OF_SHARDS.name] = "cpu"

    return found


def _why(way: Way) -> str:
    """What a layout takes time for that others do not."""
    if STAGES.name in way:
        return _PASSES
    if OF_SHARDS.name in way:
        return _FROM_HOST
    return _GATHERS if way[DATA.name] == "fsdp" else _AVERAGES


def _words(way: Way) -> str:
    """The knobs of a layout, as a sentence names them."""
    return ", ".join(f"{knob} {value}" for knob, value in way.items())
