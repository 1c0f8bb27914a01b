"""`autofit.plan_grpo`: what a training by GRPO needs of a card, generation included; planned by
prediction, and never searched: nothing is measured."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit import techniques
from autofit.api.estimate import ConfigSource, Prediction, predict, with_changes
from autofit.api.what_if import scaled
from autofit.core.config import Config, Value
from autofit.core.errors import InputError, RefusedError, is_whole, require, unknown
from autofit.core.estimate import Estimate
from autofit.core.files import expanded, write_atomically
from autofit.core.hardware import GIB
from autofit.core.knobs.activation_checkpointing import KNOB as CHECKPOINTING
from autofit.core.knobs.gradient_accumulation_steps import KNOB as ACCUMULATION
from autofit.core.knobs.loss import KNOB as LOSS
from autofit.core.knobs.micro_batch_size import KNOB as MICRO_BATCH
from autofit.core.knobs.precision import COMPUTES_IN_FP32
from autofit.core.layout import Layout
from autofit.core.result import knobs_of
from autofit.core.tasks.grpo import GRPO as TASK
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.export.from_result import planned_source
from autofit.export.tool import write
from autofit.export.tools import tool_named
from autofit.models import HuggingFaceModel, resolve
from autofit.models.generation import cache_bytes
from autofit.models.losses import GRPO

PLANNED = "planned, not searched: nothing was measured"
VLLM = ("colocate", "server", "none")
_OPTIONS = ("gpu", "gpu_mem", "device", "mem", "devices", "nodes", "link", "set")
_MOST_BETA = 1000
_SERVER_SHARE = 0.9  # vLLM's own gpu_memory_utilization

# What vLLM needs beside weights and cache, as its users' logs say it, in GiB. Nothing here is
# measured by autofit, and the median is taken.
# Activations of its profile and memory outside PyTorch: vllm-project/vllm pull requests 14447
# (0.37 + 0.20), 10511 (Llama 3 8B, 1.26 + 1.79) and 11743 (2.95 + 1.27), issues 15815 (1.26 + 0.30)
# and 11251 (2.53 + 0.39).
PROFILE_GIB = (0.57, 1.56, 2.92, 3.05, 4.22)
# CUDA graphs, which stay while it sleeps (vllm-project/vllm pull request 45623): gpustack/runner
# pull request 251, xming521/WeClone issue 101, vllm-project/vllm issues 47654 and 7553.
GRAPHS_GIB = (0.36, 0.64, 1.40, 2.41)


@dataclass(frozen=True)
class Generator:
    """What generating needs on each device, in bytes.

    Attributes:
        weights: of vLLM, in 16 bits; 0 without it: the trained ones generate.
        overhead: of vLLM beside weights and cache, CUDA graphs included.
        graphs: those of them that stay while it sleeps.
        sequences: that each device generates at once.
        sequence: the cache of one of them, of a prompt and a completion of the largest length.
    """

    weights: int
    overhead: int
    graphs: int
    sequences: int
    sequence: int

    @property
    def cache(self) -> int:
        """Of all that are generated at once."""
        return self.sequences * self.sequence

    @property
    def fixed(self) -> int:
        """What is needed before there is a cache."""
        return self.weights + self.overhead


@dataclass(frozen=True)
class Level:
    """vLLM beside the training on one card, by how deep it sleeps while weights are trained.

    Attributes:
        level: 0: awake; 1: its weights wait in host memory; 2: they are dropped, as TRL does it.
        training: what the card has left for the training, in bytes.
        cache: what it has left for the cache while completions are generated, at most what they
            need; negative: not even the weights fit.
        host: bytes of host memory.
    """

    level: int
    training: int
    cache: int
    host: int


@dataclass(frozen=True)
class Plan:
    """How to train by GRPO: a config, what it needs, TRL's keys, and whether all that fits."""

    prediction: Prediction
    generator: Generator
    at_rest: int
    levels: tuple[Level, ...]
    recommended: Mapping[str, Any]
    fits: bool
    notes: tuple[str, ...]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """The object of `autofit estimate --task grpo --json`."""
        training = self.prediction.to_dict()
        generator = {
            **dataclasses.asdict(self.generator),
            "cache": self.generator.cache,
        }
        return {
            **training,
            "measured": False,
            "fits": "yes" if self.fits else "no",
            "at_rest_bytes": self.at_rest,
            "generator_bytes": generator,
            "levels": [dataclasses.asdict(level) for level in self.levels],
            "recommended": dict(self.recommended),
            "notes": list(self.notes),
            "trl": self.text,
        }


def plan_grpo(
    model: str,
    config: ConfigSource = None,
    *,
    generations: int = 8,
    prompt_len: int = 512,
    completion_len: int = 512,
    vllm: str = "colocate",
    vllm_tensor_parallel: int = 1,
    beta: float = 0.0,
    effective_batch: int = 32,
    trust_remote_code: bool = False,
    output: str | Path | None = None,
    **options: Any,
) -> Plan:
    """Plan a training by GRPO with TRL: the largest micro-batch that is predicted to fit.

    Args:
        model: a preset's name, a directory or a hub id.
        config: as of `estimate`; what it leaves open of micro-batches and checkpointing is chosen,
            checkpointing only where nothing fits without.
        generations: completions of each prompt.
        prompt_len, completion_len: tokens, at most.
        vllm: where completions are generated: `colocate`: by vLLM on the cards that train;
            `server`: by vLLM on others; `none`: by transformers in the process that trains.
        vllm_tensor_parallel: the devices that share one vLLM.
        beta: weight of the distance from the model before training; 0: it is not asked.
        effective_batch: completions for an optimizer step, which are generated together.
        output: a file for TRL's config.
        options: gpu, gpu_mem (GiB), device, mem (GiB), devices, nodes, link, set.

    Raises:
        InputError: an argument is wrong; RefusedError: the config is not possible.
    """
    for name in options:
        if name not in _OPTIONS:
            raise unknown("option", name, _OPTIONS)
    require(isinstance(model, str), "the model must be a name", model)
    check_generation(generations, prompt_len, completion_len, vllm, vllm_tensor_parallel)
    is_number = isinstance(beta, int | float) and not isinstance(beta, bool)
    require(is_number and 0 <= beta <= _MOST_BETA, f"beta must be from 0 to {_MOST_BETA}", beta)
    rule = "the effective batch size must be a whole number"
    require(is_whole(effective_batch, 1), rule, effective_batch)
    if effective_batch % generations:
        message = (
            f"{generations} generations do not divide an effective batch size of {effective_batch}."
        )
        raise InputError(message, f"Give a multiple of {generations}.")
    path = None if output is None else expanded(output, "output")

    workload = _workload(
        resolve(
            model,
            task=TASK.name,
            sequence_length=prompt_len + completion_len,
            effective_batch_size=effective_batch,
            trust_remote_code=trust_remote_code,
        ),
        completion_len,
        beta,
    )
    given = set(options.get("set", {}))
    if config is not None:
        given |= set(knobs_of(config))
    base = _predicted(workload, config, options, given)
    _check_vllm(base, vllm)
    generator = _generator(base, vllm, vllm_tensor_parallel)
    usable = base.budget.cap_bytes(base.hardware.device)
    shares_card = vllm == "colocate"
    asleep = generator.graphs if shares_card else 0

    chosen = _largest_that_fits(base, given, usable - asleep)
    prediction = base
    if chosen is not None and chosen != base.estimate.config:
        prediction = predict(workload, chosen, **_without_set(options))

    estimate = prediction.estimate
    at_rest = _at_rest(estimate)
    levels: tuple[Level, ...] = ()
    if shares_card:
        levels = _levels(generator, estimate.high, at_rest, usable)
    trains = chosen is not None and estimate.high <= usable - asleep
    recommended, generates = _recommended(prediction, generator, levels, at_rest, vllm)
    recommended |= {
        "num_generations": generations,
        "max_completion_length": completion_len,
        "beta": beta,
    }
    if vllm != "none":
        recommended["vllm_max_model_length"] = prompt_len + completion_len
        recommended["vllm_tensor_parallel_size"] = vllm_tensor_parallel

    source = planned_source(
        prediction.workload, estimate, prediction.hardware, prediction.budget, recommended
    )
    text = write(tool_named("trl"), source).text
    if path is not None:
        write_atomically(path, text)
    notes = (f"{PLANNED}.", *_assumptions(generator, vllm), *estimate.notes)
    fits = trains and generates
    return Plan(prediction, generator, at_rest, levels, recommended, fits, notes, text)


def check_generation(
    generations: Any,
    prompt_len: Any,
    completion_len: Any,
    vllm: Any,
    vllm_tensor_parallel: Any,
) -> None:
    """Raise an InputError for what cannot be generated so."""
    require(is_whole(generations, 2), "generations must be a whole number from 2", generations)
    for name, tokens in {"prompt_len": prompt_len, "completion_len": completion_len}.items():
        rule = f"{name} must be a whole number from 1 to {2**30}"
        require(is_whole(tokens, 1) and tokens <= 2**30, rule, tokens)
    is_known = isinstance(vllm, str) and vllm in VLLM
    require(is_known, f"vllm must be one of {', '.join(VLLM)}", vllm)
    rule = "vllm_tensor_parallel must be a whole number from 1 to 1024"
    fine = is_whole(vllm_tensor_parallel, 1) and vllm_tensor_parallel <= 1024
    require(fine, rule, vllm_tensor_parallel)


def _check_vllm(base: Prediction, vllm: str) -> None:
    """Raise an InputError where vLLM cannot generate for this config on this device."""
    if vllm == "colocate" and base.hardware.device == "cpu":
        raise InputError("vLLM shares no CPU with a training by TRL.", "Use vllm none.")
    if vllm == "colocate" and base.estimate.config.quantization == "int8":
        message = "TRL refuses vLLM on the same card as a model in 8 bits."
        raise InputError(message, "Use quantization nf4, or vllm server or none.")


def _workload(workload: Workload, completion_len: int, beta: float) -> Workload:
    """With completions of that length, and the reference where the loss asks it."""
    loss = GRPO(beta=beta)
    batch: Any = workload.batch
    batch = dataclasses.replace(batch, completion_length=completion_len, loss=loss)
    return dataclasses.replace(
        workload,
        batch=batch,
        loss=loss,
        frozen=loss.frozen,
        precomputes=bool(beta),
        count=batch.count,
    )


def _predicted(
    workload: Workload, config: ConfigSource, options: dict[str, Any], given: set[str]
) -> Prediction:
    """The config as TRL trains it: it never holds all logits, where the model lets it."""
    if LOSS.name not in given:
        settings = {LOSS.name: "chunked", **options.get("set", {})}
        try:
            return predict(workload, config, **{**options, "set": settings})
        except RefusedError:
            return predict(workload, config, **options)
    return predict(workload, config, **options)


def _without_set(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a config that holds the settings already."""
    return {name: value for name, value in options.items() if name != "set"}


def _largest_that_fits(base: Prediction, given: set[str], room: int) -> Config | None:
    """The config of the largest micro-batch whose high end fits, without checkpointing if any does.

    What is `given` stays. All are predicted together, and scaled by the one that was traced.
    """
    config = base.estimate.config
    per_device = base.workload.effective_batch_size // Layout.of(config).dp_degree
    sizes = [config.micro_batch_size]
    if MICRO_BATCH.name not in given:
        sizes = [size for size in range(1, per_device + 1) if per_device % size == 0]
    ways: tuple[Value, ...] = (config.activation_checkpointing,)
    if CHECKPOINTING.name not in given:
        ways = (CHECKPOINTING.off, "full")

    for way in ways:
        configs = [config]
        for size in sizes:
            changes = {MICRO_BATCH.name: size, CHECKPOINTING.name: way}
            changed = with_changes(changes, config)
            other = techniques.canonicalize(changed, base.workload, base.hardware)
            if techniques.refuse(other, base.workload, base.hardware) is None:
                configs.append(other)
        fitting = [each for each in _scaled(base, configs) if each.high <= room]
        if fitting:
            return max(fitting, key=lambda each: int(each.config.micro_batch_size or 0)).config
    return None


def _scaled(base: Prediction, configs: Sequence[Config]) -> list[Estimate]:
    """The estimates of all but the first, which is that of the base."""
    memory, _ = predict_all(base.workload, base.hardware, configs)
    return [
        scaled(base, config, memory=nbytes / memory[0])
        for config, nbytes in zip(configs[1:], memory[1:], strict=True)
        if not math.isnan(nbytes)
    ]


def _at_rest(estimate: Estimate) -> int:
    """What the training holds while completions are generated: no gradients."""
    resting = estimate.resting
    assert resting is not None, "predict follows the config by itself"
    held = resting.weights + resting.adapters + resting.optimizer
    return held + estimate.breakdown["context"]


def _generator(base: Prediction, vllm: str, split: int) -> Generator:
    """What generates, by the model's config."""
    workload = base.workload
    model = workload.model
    assert isinstance(model, HuggingFaceModel) and workload.sequence_length and workload.traits
    config = model.transformers_config()
    own = base.estimate.config
    sequences = workload.effective_batch_size // Layout.of(own).dp_degree
    if vllm == "none":
        itemsize = 4 if own.precision in COMPUTES_IN_FP32 else 2
        held = cache_bytes(config, workload.sequence_length, itemsize=itemsize)
        return Generator(0, 0, 0, sequences, held)

    graphs = _median_bytes(GRAPHS_GIB)
    return Generator(
        weights=2 * (workload.traits.parameters or 0) // split,
        overhead=_median_bytes(PROFILE_GIB) + graphs,
        graphs=graphs,
        sequences=sequences * split,
        sequence=cache_bytes(config, workload.sequence_length, itemsize=2, split=split),
    )


def _median_bytes(gibs: Sequence[float]) -> int:
    ordered = sorted(gibs)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return int(middle * GIB)


def _levels(generator: Generator, peak: int, at_rest: int, usable: int) -> tuple[Level, ...]:
    """What is left on a card that both use, by the level of sleep."""
    awake = usable - generator.fixed - peak
    asleep = usable - generator.fixed - at_rest
    caches = [min(generator.cache, left) for left in (awake, asleep, asleep)]
    resident = generator.fixed + max(0, caches[0])
    return (
        Level(0, usable - resident, caches[0], 0),
        Level(1, usable - generator.graphs, caches[1], generator.weights),
        Level(2, usable - generator.graphs, caches[2], 0),
    )


def _recommended(
    prediction: Prediction,
    generator: Generator,
    levels: Sequence[Level],
    at_rest: int,
    vllm: str,
) -> tuple[dict[str, Any], bool]:
    """TRL's keys of the generation, and whether at least one sequence can be generated."""
    config = prediction.estimate.config
    total = prediction.budget.device_bytes
    steps = int(config.gradient_accumulation_steps or 1)
    keys: dict[str, Any] = {
        "per_device_train_batch_size": config.micro_batch_size,
        ACCUMULATION.name: steps,
        "steps_per_generation": steps,
        "use_vllm": vllm != "none",
    }
    if vllm == "none":
        room = prediction.budget.cap_bytes(prediction.hardware.device) - at_rest
        return keys, generator.cache <= room

    keys["vllm_mode"] = vllm
    if vllm == "server":
        return keys, generator.fixed + generator.sequence <= _SERVER_SHARE * total

    # Asleep it costs time to wake, so only where both do not fit at once; TRL has levels 0 and 2.
    sleeps = levels[0].cache < generator.cache
    cache = levels[2 if sleeps else 0].cache
    share = max(0, generator.fixed + cache) / total
    hundredths = math.floor(share * 100)
    if cache == generator.cache:  # all of it is wanted
        hundredths = math.ceil(share * 100)
    keys["vllm_gpu_memory_utilization"] = hundredths / 100
    keys["vllm_enable_sleep_mode"] = sleeps
    return keys, cache >= generator.sequence


def _assumptions(generator: Generator, vllm: str) -> tuple[str, ...]:
    """What the plan takes from elsewhere."""
    if vllm == "none":
        return ("transformers generates all sequences of a step at once, in the same process.",)

    profile = f"{min(PROFILE_GIB)}-{max(PROFILE_GIB)}"
    graphs = f"{min(GRAPHS_GIB)}-{max(GRAPHS_GIB)}"
    overhead = generator.overhead / GIB
    return (
        f"assumed, not measured: vLLM needs {overhead:.1f} GiB beside weights and cache; its users' "
        f"logs have {profile} GiB for activations and libraries and {graphs} for CUDA graphs, which "
        "stay while it sleeps.",
        "vLLM is taken to hold weights and cache in 16 bits.",
        "vLLM's sleep frees nothing where PYTORCH_ALLOC_CONF has expandable_segments:True "
        "(vllm-project/vllm pull request 11743): leave that out where it sleeps.",
    )
