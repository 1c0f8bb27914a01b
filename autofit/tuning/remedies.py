"""What would help where a config does not fit: others that are predicted to, the cheapest first.

Each kind of remedy is a small product of knobs around the config, predicted together from a few
shallow traces. Of each kind the fastest is named that fits with room for what such predictions
leave out, unless a cheaper kind does as well.
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, UntraceableError
from autofit.core.estimate import Remedy
from autofit.core.hardware import GIB, MIB, Hardware
from autofit.core.knobs import knob_named, yaml_word
from autofit.core.layout import Layout, fitted_to
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.passes import rest_on_host
from autofit.estimate.trace import trace
from autofit.models import HuggingFaceModel
from autofit.models.huggingface import of_length
from autofit.tuning.target import estimate_on

# How far the upper end of an estimate may be above the tensors that are predicted here. Compiled
# code, and what is on its way to the host and back, widen that; so do gradients on the host, and
# gaps that all logits leave behind in the allocator's memory (benchmarks.what_helps).
_ABOVE = {"cpu": 1.02, "cuda": 1.15}
_WIDER = 1.1
_OF_GRADIENTS = 1.05
_OF_LOGITS = 1.16
_CONTEXT = 500 * MIB  # of CUDA, where the card does not tell
_COMMUNICATORS = 640 * MIB  # of NCCL, not measured
_MEASURING = 0.2  # seconds, for timing operators on a CPU: only the order of speeds matters here
_DEVICES = (2, 4, 8)
_SHORTEST = 128  # tokens of a sequence
_OF_THE_SAME = ("time", "host")  # kinds that change neither the numbers nor the data
_RANK = 16
# Of the seconds, or of the memory, of every cheaper remedy: else a dearer one is not worth naming.
_FASTER = 0.97
_SMALLER = 0.7

Levers = dict[str, tuple[Value, ...]]  # the values to try of each knob


def what_helps(
    workload: Workload,
    hardware: Hardware,
    budget: Budget,
    config: Config,
) -> tuple[Remedy, ...]:
    """The remedies for a config that does not fit; none where the model cannot be traced."""
    try:
        return _Search(workload, hardware, budget, config).remedies()
    except UntraceableError:
        return ()


@dataclass(frozen=True)
class _Found:
    config: Config
    nbytes: float  # of the device, at most
    seconds: float

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.nbytes)

    def cost(self, start: Config) -> float:
        """For sorting: the slower, and among nearly equal ones what changes more."""
        slowness = 0.0 if math.isnan(self.seconds) else math.log(self.seconds)
        return slowness + 0.01 * len(self.config.differences(start))


@dataclass(frozen=True)
class _Search:
    workload: Workload
    hardware: Hardware
    budget: Budget
    config: Config

    def remedies(self) -> tuple[Remedy, ...]:
        """What helps, the cheapest first; more memory last."""
        has_room = self._usable > _context_of(self.hardware)  # else nothing helps but more memory
        kinds: list[tuple[str, list[Config]]] = []
        configs = {self.config: None}
        if has_room:
            for kind, levers in self._levers():
                members = self._product(levers)
                kinds.append((kind, members))
                configs |= dict.fromkeys(members)

        predicted = self._predicted(
            self.workload,
            self.hardware,
            list(configs),
        )
        found = {row.config: row for row in predicted}

        named: list[Remedy] = []
        for kind, members in kinds:
            if _has_kind(named, (kind,)):
                continue

            fitting = [found[config] for config in members if self._fits(found[config])]
            best = min(fitting, key=lambda row: row.cost(self.config), default=None)
            if best and not any(_makes_needless(remedy, best) for remedy in named):
                named.append(
                    self._remedy(
                        kind,
                        best,
                        self._settings(best.config),
                    )
                )

        if has_room:
            _, of_time = kinds[0]
            known = [found[config] for config in (self.config, *of_time) if found[config].is_known]
            leanest = self.config
            if known:
                leanest = min(known, key=attrgetter("nbytes")).config

            if not _has_kind(named, _OF_THE_SAME):
                named = [*self._shards_on_host(leanest), *named]
            if not _has_kind(named, _OF_THE_SAME):
                named += self._shorter(leanest)

            named += self._more_devices(leanest)

        whole = found[self.config]
        if whole.is_known and whole.nbytes > self._usable:
            named.append(
                self._remedy(
                    "memory",
                    whole,
                    self._budget_for(whole),
                )
            )

        return tuple(named)

    def _budget_for(self, found: _Found) -> tuple[str, str]:
        """The option that gives as much memory as a config needs."""
        size = self.budget.bytes_for(int(found.nbytes), self.hardware.device) / GIB
        grain = 10 if size >= 1 else 100
        option = "--mem" if self.hardware.device == "cpu" else "--gpu-mem"

        return option, f"{math.ceil(size * grain) / grain:g}"

    @property
    def _usable(self) -> int:
        return self.budget.cap_bytes(self.hardware.device)

    def _fits(self, found: _Found) -> bool:
        return found.nbytes <= self._usable

    def _levers(self) -> list[tuple[str, Levers]]:
        """By kind, the values to try of each knob; the second of a kind is for where the first does
        not fit."""
        size = self.config.micro_batch_size or self.workload.effective_batch_size
        choices = self._choices("micro_batch_size")
        sizes = tuple(choice for choice in choices if isinstance(choice, int) and choice < size)

        time = self._also(
            micro_batch_size=sizes,
            activation_checkpointing=("full",),
            loss=("chunked",),
            optimizer_in_backward=(True,),
            data_parallel=("fsdp",),
        )
        offloads = self._also(
            activation_offload=("cpu",),
            optimizer_offload=("cpu",),
            parameter_offload=("cpu",),
        )
        numbers = {name: values[-1:] for name, values in self._also(precision=("bf16",)).items()}
        fewer_bits = {
            **time,
            **numbers,
            **self._also(optimizer=("adamw-8bit",)),
        }

        levers = [
            ("time", time),
            ("host", {**time, **offloads}),
            ("numbers", fewer_bits),
            ("numbers", {**fewer_bits, **offloads}),
        ]

        adapters: Levers = {}
        if not self.config.lora_rank:
            adapters = {"lora_rank": (_RANK,), "lora_targets": ("all-linear",)}
            levers.append(("lora", {**time, **numbers, **adapters}))

        if self.config.quantization == "none":
            nf4 = {"quantization": ("nf4",), **self._also(parameter_offload=("cpu",))}
            levers.append(("qlora", {**time, **numbers, **adapters, **nf4}))

        return levers

    def _choices(self, knob: str) -> tuple[Value, ...]:
        return techniques.technique_named(knob).choices_for(self.workload, self.hardware)

    def _also(self, **values: tuple[Value, ...]) -> Levers:
        """The present values of knobs, and those of others that they can have here."""
        levers: Levers = {}
        for knob, others in values.items():
            choices = self._choices(knob)
            levers[knob] = (self.config[knob], *(value for value in others if value in choices))

        return levers

    def _product(self, levers: Levers) -> list[Config]:
        """Every other possible config with these values."""
        made: dict[Config, None] = {}
        for chosen in itertools.product(*levers.values()):
            config = self._changed(
                dict(zip(levers, chosen, strict=True)),
                self.hardware,
            )
            if config is not None and config != self.config:
                made[config] = None

        return list(made)

    def _changed(self, changes: Mapping[str, Value], hardware: Hardware) -> Config | None:
        """The config with these changes; None where it is impossible."""
        knobs = {
            name: value
            for name, value in self.config.items()
            if value is not None and not knob_named(name).follows
        }
        try:
            config = techniques.canonicalize(
                {**knobs, **changes},
                self.workload,
                hardware,
            )
        except InputError:
            return None

        if techniques.refuse(config, self.workload, hardware):
            return None

        return config

    def _predicted(
        self,
        workload: Workload,
        hardware: Hardware,
        configs: Sequence[Config],
    ) -> Iterator[_Found]:
        """The most memory that configs may need, and the seconds of a step."""
        sizes, seconds = predict_all(
            workload,
            hardware,
            configs,
            measuring=_MEASURING,
            host_bytes=self.budget.host_bytes,
        )
        for config, size, taken in zip(configs, sizes, seconds, strict=True):
            nbytes = size * self._above(config, hardware) + _context_of(hardware)
            yield _Found(config, nbytes, taken)

    def _above(self, config: Config, hardware: Hardware) -> float:
        """How many times what is predicted of its tensors a config may need."""
        above = _ABOVE[hardware.device]
        if {config.compile, config.activation_offload, config.parameter_offload} != {"none"}:
            above *= _WIDER
        if rest_on_host(config):
            above *= _OF_GRADIENTS

        traits = self.workload.traits
        has_logits = traits is not None and traits.head and config.loss == "standard"
        if has_logits and hardware.device == "cuda":
            above *= _OF_LOGITS

        return above

    def _shorter(self, config: Config) -> Iterator[Remedy]:
        """The longest of a half, a quarter ... of the sequence that fits."""
        if not isinstance(self.workload.model, HuggingFaceModel):
            return

        configs = list(dict.fromkeys([self.config, config]))
        length = (self.workload.sequence_length or 0) // 2
        while length >= _SHORTEST:
            shorter = of_length(self.workload, length)
            for found in self._predicted(shorter, self.hardware, configs):
                if self._fits(found):
                    options = (*self._settings(found.config), "--seq-len", str(length))
                    yield self._remedy("shorter", found, options, tokens=length)
                    return

            length //= 2

    def _shards_on_host(self, leanest: Config) -> Iterator[Remedy]:
        """The same step with every rank's parts of the weights and their state in host memory."""
        if "cpu" not in self._choices("fsdp_offload"):
            return

        for config in dict.fromkeys([self.config, leanest]):
            offloaded = self._changed(dict(config, fsdp_offload="cpu"), self.hardware)
            if offloaded is None or offloaded == config:
                continue

            found = self._followed(offloaded, self.hardware)
            if found:
                yield self._remedy(
                    "host",
                    found,
                    self._settings(offloaded),
                )
                return

    def _more_devices(self, config: Config) -> Iterator[Remedy]:
        """The fewest cards that are enough, where each holds a part of the weights."""
        if self.hardware.device == "cpu":
            return

        batch = self.workload.effective_batch_size
        for devices in _DEVICES:
            hardware = self.hardware.of_several(
                devices,
                self.hardware.nodes,
                self.hardware.link,
            )
            if hardware.world <= self.hardware.world or batch % hardware.world:
                continue

            several = self._over_devices(config, hardware)
            if several is None:
                continue

            (roughly,) = self._predicted(
                self.workload,
                hardware,
                [several],
            )
            if not self._fits(roughly):
                continue

            # What stages need is not about what is gathered.
            found: _Found | None = roughly
            if several.data_parallel == "fsdp":
                found = self._followed(several, hardware)
            if found:
                options = ("--devices", str(devices), *self._settings(several, hardware))
                yield self._remedy("devices", found, options, devices=devices)
                return

    def _over_devices(self, config: Config, hardware: Hardware) -> Config | None:
        """The config with its weights divided over more devices, in more stages where it has some;
        None where that is impossible."""
        layout = Layout.of(config)
        if layout.world == layout.pipeline > 1:
            stages = self._changed(config.replace(pipeline_parallel=hardware.world), hardware)
            if stages is not None:
                return stages

        shards = fitted_to(
            config.replace(data_parallel="fsdp"),
            hardware.world,
            self.workload.effective_batch_size,
        )
        return self._changed(shards, hardware)

    def _followed(self, config: Config, hardware: Hardware) -> _Found | None:
        """A config that fits when a whole step of it is followed.

        Nothing else tells what gathered weights and their streams reserve.
        """
        with contextlib.suppress(InputError):
            step = trace(self.workload, config, hardware)
            whole = estimate_on(
                step,
                self.workload,
                hardware,
                self.budget,
            )

            if whole.verdict == "yes":
                return _Found(
                    config,
                    whole.high,
                    whole.step_seconds or math.nan,
                )

        return None

    def _settings(self, config: Config, hardware: Hardware | None = None) -> tuple[str, ...]:
        """The options that make this config of the one that does not fit, without those that follow
        from others."""
        changed: dict[str, Value] = {}
        for knob, (value, _) in config.differences(self.config).items():
            if value is not None:
                changed[knob] = value

        for knob in tuple(changed):
            fewer = dict(changed)
            del fewer[knob]
            follows = knob_named(knob).follows
            if follows or config == self._changed(fewer, hardware or self.hardware):
                changed = fewer

        options: list[str] = []
        for knob, value in changed.items():
            options += ["--set", f"{knob}={yaml_word(value)}"]

        return tuple(options)

    def _remedy(
        self,
        kind: str,
        found: _Found,
        options: tuple[str, ...],
        *,
        devices: int | None = None,
        tokens: int | None = None,
    ) -> Remedy:
        seconds = None
        samples = None
        per_second = None
        if not math.isnan(found.seconds):
            seconds = found.seconds
            samples = self.workload.effective_batch_size / seconds

        length = tokens or self.workload.sequence_length
        if samples and length and self.workload.unit == "tokens":
            per_second = samples * length

        return Remedy(
            kind,
            options,
            found.config,
            int(found.nbytes),
            devices=devices or self.hardware.devices,
            step_seconds=seconds,
            samples_per_second=samples,
            tokens_per_second=per_second,
        )


def _context_of(hardware: Hardware) -> int:
    """Bytes that the context and the communicators take of a card, at most."""
    if hardware.device == "cpu":
        return 0

    context = hardware.context_bytes or _CONTEXT

    return context + _COMMUNICATORS if hardware.world > 1 else context


def _has_kind(remedies: Iterable[Remedy], kinds: Sequence[str]) -> bool:
    return any(remedy.kind in kinds for remedy in remedies)


def _makes_needless(cheaper: Remedy, found: _Found) -> bool:
    """Whether a dearer remedy is hardly faster and hardly smaller."""
    is_faster = found.seconds < (cheaper.step_seconds or math.inf) * _FASTER
    return not is_faster and found.nbytes > cheaper.device_bytes * _SMALLER
