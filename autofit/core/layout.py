"""Layout: how the devices of a training are divided among the ways of training in parallel.

replicate x shard x context x tensor x pipeline = world, the number of all devices, each of which one
process (a rank) trains on. Ranks of different replicas or shards see different samples; ranks of one
context group see the same samples and other tokens, those of one tensor group the same samples and
tokens. The stages of a pipeline see the same samples one after the other: the ranks of one stage
follow each other, so that stages lie on different nodes where there are several.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.core.knobs import KNOBS

_DEGREES = tuple(knob for knob in KNOBS.values() if knob.degree)
_INTERLEAVED_CHUNKS = 2


@dataclass(frozen=True)
class Layout:
    """The degrees of a canonical Config; one device has 1 of each."""

    replicate: int = 1  # groups of devices that each hold all weights
    shard: int = 1  # devices among which one group divides its weights
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Value]) -> Self:
        """The layout of a canonical config: what is null, or not there, is 1."""
        return cls(**{knob.degree: int(config.get(knob.name) or 1) for knob in _DEGREES})

    @property
    def knobs(self) -> dict[str, Value]:
        """The degrees, as a config says them."""
        return {knob.name: getattr(self, knob.degree) for knob in _DEGREES}

    @property
    def world(self) -> int:
        """The number of devices."""
        return self.dp_degree * self.same_samples

    @property
    def stage_world(self) -> int:
        """The number of devices that hold the same stage of a pipeline, or parts of it."""
        return self.world // self.pipeline

    @property
    def same_samples(self) -> int:
        """The number of devices that see the same samples."""
        return self.context * self.tensor * self.pipeline

    @property
    def groups(self) -> int:
        """How many groups each device exchanges something with: all, and those of each degree."""
        if self.world == 1:
            return 0
        sizes = (
            self.replicate,
            self.shard * self.context,
            self.context,
            self.tensor,
            self.pipeline,
        )
        return 1 + len([size for size in sizes if 1 < size < self.world])

    @property
    def dp_degree(self) -> int:
        """The number of parts that each effective batch is divided into."""
        return self.replicate * self.shard


def dp_degree(config: Mapping[str, Value], hardware: Hardware) -> int:
    """The number of parts of each effective batch, also of a config that is not canonical yet.
    Raises InputError where the degrees do not divide the devices."""
    alike = _alike(config)
    if hardware.world % alike:
        devices = "one device" if hardware.world == 1 else f"{hardware.world} devices"
        names = " x ".join(knob.name for knob in _DEGREES if knob.same_samples)
        message = f"{names} is {alike}, which does not divide {devices}"
        raise InputError(f"{message}.", "Choose degrees that divide them, or leave them out.")
    return hardware.world // alike


def chunks_of(config: Config) -> int:
    """How many rows of blocks each stage of a pipeline holds, with other stages' between them."""
    return _INTERLEAVED_CHUNKS if config.pipeline_schedule == "interleaved" else 1


def goes_in_rounds(micro_batches: int, stages: int) -> bool:
    """Whether so many micro-batches go through chunks in rounds of as many each, at least one of
    each stage; as PyTorch's interleaved schedule wants it."""
    return micro_batches % max(1, micro_batches // stages) == 0


def dividing(config: Mapping[str, Value], world: int, effective_batch: int) -> list[int]:
    """The numbers of devices, at most `world`, that divide a batch, most first; `world` where none does."""
    alike = _alike(config)
    sizes = range(alike, world + 1, alike)
    found = [size for size in sizes if not effective_batch % (size // alike)]
    return found[::-1] or [world]


def part_of(config: Mapping[str, Value], world: int, effective_batch: int) -> int:
    """The samples of each effective batch that one of so many devices sees."""
    return effective_batch * _alike(config) // world


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a positive number up to `most`, which is at least 1."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)


def fitted_where(
    config: Mapping[str, Value],
    world: int,
    effective_batch: int,
    fits: Callable[[int, dict[str, Value]], bool],
) -> tuple[int, dict[str, Value]] | None:
    """The most devices, up to so many, on which a config for another number `fits`, and the config for
    them: as it is, or with the largest micro-batch that fits of half, a quarter, ... None where nothing
    fits."""
    for size in dividing(config, world, effective_batch):
        whole = fitted_to(config, size, effective_batch)
        if fits(size, whole):
            return size, whole

        part = part_of(whole, size, effective_batch)
        micro = Config(whole).micro_batch_size or part
        smaller: list[dict[str, Value]] = []
        while micro > 1:
            micro = largest_divisor(part, micro // 2)
            smaller.append(
                dict(whole, micro_batch_size=micro, gradient_accumulation_steps=part // micro)
            )

        if smaller and fits(size, smaller[-1]):  # else no other does
            return size, next((knobs for knobs in smaller[:-1] if fits(size, knobs)), smaller[-1])
    return None


def fitted_to(config: Mapping[str, Value], world: int, effective_batch: int) -> dict[str, Value]:
    """A config for another number of devices: what follows from that is left out, degrees that do not
    divide it are, and the micro-batch is the largest that divides a device's part and is no larger than
    it was."""
    found = dict(config)
    given = Config(config)
    if Layout.of(config).world == world and (world > 1 or not given.data_parallel):
        return found

    if given.data_parallel == "none":  # only layers were split: perhaps no device holds the model
        found["data_parallel"] = "fsdp"
    for knob in KNOBS.values():
        divides = True
        if knob.degree:
            degree = int(found.get(knob.name) or 1)
            divides = given.data_parallel != "ddp" and world % degree == 0
        if knob.derived or (knob.of_devices and (world == 1 or not divides)):
            found.pop(knob.name, None)

    part = part_of(found, world, effective_batch)
    if part and given.micro_batch_size is not None:
        found["micro_batch_size"] = largest_divisor(part, given.micro_batch_size)
    return found


def kind_of(config: Config, hardware: Hardware) -> Value:
    """`data_parallel` of a config, which is derived where it is not said; null on one device."""
    if hardware.world == 1:
        return config.data_parallel
    several = dp_degree(config, hardware)
    if several == 1 and (config.pipeline_parallel or 1) > 1:
        return "none"  # each device holds a stage, and nothing to divide it with
    if config.data_parallel:
        return config.data_parallel
    if several == hardware.world:
        return "ddp"
    if several == 1 and config.context_parallel in (None, 1):
        return "none"
    return "fsdp"


def divided_by(config: Mapping[str, Value]) -> tuple[str, ...]:
    """The ways in which a canonical config divides a training: each exchanges something else."""
    degrees = vars(Layout.of(config))
    return tuple(way for way, degree in degrees.items() if degree > 1)


def implied(config: Mapping[str, Value]) -> set[str]:
    """The knobs of several devices that tell a reader nothing: degrees of 1, nulls, what is derived."""
    is_replicated = config.get("data_parallel") == "ddp"
    found = set()
    for knob in KNOBS.values():
        says_nothing = knob.derived or str(config.get(knob.name)) in ("None", "1")
        is_all = is_replicated and knob.degree == "replicate"
        if knob.of_devices and knob.name != "data_parallel" and (says_nothing or is_all):
            found.add(knob.name)
    return found


def degrees(hardware: Hardware, heads: int = 0) -> tuple[Value, ...]:
    """Into how many parts the devices of a node can divide something, and heads of attention; null on
    one device."""
    if hardware.world == 1:
        return (None,)
    common = math.gcd(hardware.devices, heads)
    return tuple(size for size in range(1, common + 1) if not common % size)


def _alike(config: Mapping[str, Value]) -> int:
    """The number of devices that see the same samples."""
    return math.prod(int(config.get(knob.name) or 1) for knob in _DEGREES if knob.same_samples)
