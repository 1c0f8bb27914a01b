"""What would help: in the order of what it costs, only what fits, and nothing dearer that is no faster."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import UntraceableError
from autofit.core.estimate import REMEDIES, Estimate, Remedy
from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Workload
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card, hardware_of
from autofit.report.remedies import remedy_lines
from autofit.training.inspect import inspect_workload
from autofit.tuning import remedies
from autofit.tuning.remedies import what_helps
from autofit.tuning.target import estimate_on
from tests import tiny

CARD = hardware_of(card("rtx-4090"))
BUDGET = Budget(10 * GIB, 64 * GIB, margin=0.0)
PLAIN = tiny.llama_workload(8, sequence_length=512, max_position_embeddings=512)
WORKLOAD = dataclasses.replace(PLAIN, traits=inspect_workload(PLAIN, CARD, budget_bytes=None))
Formula = Callable[[Config, Workload, Hardware], tuple[float, float]]  # GiB and seconds


def helps(
    monkeypatch: pytest.MonkeyPatch, formula: Formula, device: Hardware = CARD, **knobs: Any
) -> list[Remedy]:
    """The remedies where memory and time follow a formula."""

    def predict(workload: Workload, hardware: Hardware, configs: Sequence[Config], **_: Any) -> Any:
        figures = [formula(config, workload, hardware) for config in configs]
        return [gib * GIB for gib, _ in figures], [seconds for _, seconds in figures]

    def follow(config: Config, workload: Workload, hardware: Hardware, budget: Budget) -> Estimate:
        gib, seconds = formula(config, workload, hardware)
        nbytes = int(gib * GIB) + hardware.context_bytes
        return Estimate(
            config, nbytes, nbytes, nbytes, nbytes, {}, step_seconds=seconds, budget=budget
        )

    monkeypatch.setattr(remedies, "predict_all", predict)
    monkeypatch.setattr(remedies, "trace", lambda workload, config, hardware: config)
    monkeypatch.setattr(remedies, "estimate_on", follow)
    config = techniques.canonicalize({"micro_batch_size": 8, **knobs}, WORKLOAD, device)
    return list(what_helps(WORKLOAD, device, BUDGET, config))


def of_kind(kind: str, found: list[Remedy]) -> Remedy:
    (remedy,) = (each for each in found if each.kind == kind)
    return remedy


def weigh(config: Config, workload: Workload, hardware: Hardware) -> tuple[float, float]:
    """A model of 16 GiB at full precision whose weights, state and activations shrink as its knobs say."""
    nf4, lora = config["quantization"] == "nf4", bool(config["lora_rank"])
    weights = 1.0 if nf4 else 2.0 if config["precision"] == "bf16" else 4.0
    state = 0.1 if lora else 0.0 if config["optimizer_offload"] == "cpu" else 3 * weights
    activations = int(str(config["micro_batch_size"])) * (workload.sequence_length or 0) / 512
    activations *= 0.25 if config["activation_checkpointing"] == "full" else 1.0
    seconds = (
        1.0
        + (config["activation_checkpointing"] == "full")
        + 4 * (config["optimizer_offload"] == "cpu")
    )
    seconds -= 0.5 * (config["precision"] == "bf16") - 0.2 * nf4
    return (weights + state) / hardware.world + activations, seconds / hardware.world


def test_the_kinds_come_in_the_order_of_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = helps(monkeypatch, weigh, precision="fp32")
    kinds = [each.kind for each in found]
    assert kinds == sorted(kinds, key=REMEDIES.index)
    assert {"host", "numbers", "lora", "devices", "memory"} <= set(kinds)
    assert "time" not in kinds  # weights and state alone are 16 GiB
    assert "--set optimizer_offload=cpu" in " ".join(of_kind("host", found).options)
    # 16 / 2 and 1 take 10 with the margin
    assert of_kind("devices", found).options[:2] == ("--devices", "4")
    assert of_kind("devices", found).devices == 4
    assert "data_parallel=fsdp" in of_kind("devices", found).options


def test_a_pipeline_gets_more_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not shards of its stages, whose weights a slow link would have to gather."""
    deep = tiny.llama_workload(
        8,
        sequence_length=512,
        max_position_embeddings=512,
        num_hidden_layers=4,
    )
    traits = inspect_workload(deep, CARD, budget_bytes=None)
    monkeypatch.setattr(f"{__name__}.WORKLOAD", dataclasses.replace(deep, traits=traits))

    two_cards = CARD.of_several(2)
    found = helps(monkeypatch, weigh, two_cards, precision="fp32", pipeline_parallel=2)
    options = of_kind("devices", found).options
    assert options[:2] == ("--devices", "4")
    assert "pipeline_parallel=4" in options
    assert "data_parallel=fsdp" not in options


@pytest.mark.parametrize(("least", "offloads"), [(8.0, False), (20.0, True)])
def test_smaller_numbers_lean_on_the_host_where_they_do_not_fit_alone(
    monkeypatch: pytest.MonkeyPatch, least: float, offloads: bool
) -> None:
    def formula(config: Config, *_: Any) -> tuple[float, float]:
        small, rests = config["precision"] == "bf16", config["optimizer_offload"] == "cpu"
        return (4.0 if rests else least) if small else (50.0 if rests else 90.0), 1.0 + rests

    numbers = of_kind("numbers", helps(monkeypatch, formula, precision="fp32"))
    assert ("optimizer_offload=cpu" in numbers.options) == offloads
    (line,) = remedy_lines([numbers])
    assert ("with a part of them in host memory" in line) == offloads


def test_only_what_follows_from_nothing_else_is_to_be_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora = of_kind("lora", helps(monkeypatch, weigh, precision="bf16"))
    settings = dict(word.split("=") for word in lora.options if word != "--set")
    assert settings["lora_rank"] == "16"
    assert (
        not {"gradient_accumulation_steps", "lora_alpha", "lora_targets", "data_parallel_shard"}
        & settings.keys()
    )
    typed = {"precision": "bf16", "micro_batch_size": 8, "lora_rank": 16}
    typed |= {knob: int(value) if value.isdigit() else value for knob, value in settings.items()}
    assert techniques.canonicalize(typed, WORKLOAD, CARD) == lora.config


def test_a_dearer_help_that_is_no_faster_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(config: Config, *_: Any) -> tuple[float, float]:
        return (5.0 if config["micro_batch_size"] != 8 or config["lora_rank"] else 20.0), 1.0

    found = helps(monkeypatch, formula)
    assert [each.kind for each in found][:1] == ["time"]
    assert not {"host", "numbers", "lora", "qlora", "shorter"} & {each.kind for each in found}


def test_a_dearer_help_that_needs_much_less_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(config: Config, *_: Any) -> tuple[float, float]:
        return (
            2.0 if config["quantization"] == "nf4" else 8.0 if config["lora_rank"] else 90.0
        ), 1.0

    assert [each.kind for each in helps(monkeypatch, formula)] == ["lora", "qlora", "memory"]


def test_where_no_budget_is_exceeded_nothing_larger_is_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "memory" not in {each.kind for each in helps(monkeypatch, lambda *_: (1.0, 1.0))}


def test_all_of_it_in_qlora_where_only_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = helps(
        monkeypatch, lambda config, *_: (5.0 if config["quantization"] == "nf4" else 90.0, 1.0)
    )
    assert [each.kind for each in found] == ["qlora", "memory"]
    assert "quantization=nf4" in found[0].options


def test_shorter_samples_and_more_memory_where_nothing_else_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def formula(config: Config, workload: Workload, _: Hardware) -> tuple[float, float]:
        return (5.0 if workload.sequence_length == 128 else 90.0), 1.0

    shorter, memory = helps(monkeypatch, formula)
    assert shorter.options[-2:] == ("--seq-len", "128")
    assert memory.kind == "memory"
    assert memory.options[0] == "--gpu-mem"
    assert float(memory.options[1]) >= 90.0


def test_on_a_cpu_there_are_no_cards_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    found = helps(monkeypatch, lambda config, *_: (90.0, 1.0), tiny.CPU)
    assert [each.options[0] for each in found] == ["--mem"]


def test_weights_that_are_split_over_cards_can_wait_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def formula(config: Config, *_: Any) -> tuple[float, float]:
        return (5.0, 2.0) if config["fsdp_offload"] == "cpu" else (90.0, 1.0)

    host, memory = helps(
        monkeypatch, formula, CARD.of_several(2), data_parallel="fsdp", micro_batch_size=4
    )
    assert (host.kind, memory.kind) == ("host", "memory")
    assert host.options == ("--set", "fsdp_offload=cpu")


def test_what_is_named_fits_when_its_step_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of what benchmarks.what_helps draws: a model whose logits and activations are most of its memory."""
    # several cards take as long to follow as all the rest
    monkeypatch.setattr(remedies, "_DEVICES", ())
    plain = tiny.llama_workload(
        16, sequence_length=1024, max_position_embeddings=1024, vocab_size=8192
    )
    workload = dataclasses.replace(plain, traits=WORKLOAD.traits)
    start = techniques.canonicalize({"precision": "bf16", "micro_batch_size": 16}, workload, CARD)
    budget = Budget(CARD.context_bytes + GIB // 3, GIB, margin=0.0)
    assert estimate_on(trace(workload, start, CARD), workload, CARD, budget).verdict == "no"
    found = what_helps(workload, CARD, budget, start)
    assert found[0].kind == "time"
    for each in found:
        enough = (
            Budget(int(float(each.options[1]) * GIB), GIB, margin=0.0)
            if each.kind == "memory"
            else budget
        )
        followed = estimate_on(trace(workload, each.config, CARD), workload, CARD, enough)
        assert followed.verdict == "yes", each


def test_a_model_that_cannot_be_followed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(*_: Any) -> tuple[float, float]:
        raise UntraceableError("of a test.")

    assert helps(monkeypatch, formula) == []
