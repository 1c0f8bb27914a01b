from dataclasses import replace
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.estimate.cuda_kernels import workspace_bytes
from autofit.estimate.figures import predict_all
from autofit.estimate.peak import peak_of
from autofit.estimate.scaling import Symbols
from autofit.estimate.shallow_model import Depth
from autofit.estimate.trace import trace
from autofit.estimate.trace_keys import (
    TraceKeys,
    group_key,
    group_of,
    interpolation_endpoints,
    pass_key,
)
from autofit.hardware.catalogue import card, hardware_of
from autofit.techniques import canonicalize
from tests.estimate.traced import AMPERE
from tests.tiny import llama_workload

WORKLOAD = replace(llama_workload(8, 64), traits=None)
SYMBOLS = Symbols.for_sizes({64, 16})
KEYS = TraceKeys.on(AMPERE, SYMBOLS)
LORA: dict[str, Any] = {"lora_rank": 8, "lora_targets": "all-linear", "precision": "bf16"}


def config_of(**knobs: Any) -> Config:
    return canonicalize(knobs, WORKLOAD, AMPERE)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({"micro_batch_size": 1}, {"micro_batch_size": 8}, True),
        ({**LORA, "lora_rank": 8}, {**LORA, "lora_rank": 64}, True),
        ({}, LORA, False),
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}, False),
        ({"activation_checkpointing": "full"}, {}, False),
    ],
)
def test_configs_of_a_group_differ_in_what_scales(
    one: dict[str, Any], other: dict[str, Any], shared: bool
) -> None:
    first, second = config_of(**one), config_of(**other)
    assert (group_key(first) == group_key(second)) is shared
    assert (group_of(first) == group_of(second)) is shared


def test_what_the_update_does_is_no_matter_of_forward_and_backward() -> None:
    plain = config_of()
    for knobs in (
        {"optimizer": "adamw-8bit"},
        {"optimizer_in_backward": True},
        {"optimizer_offload": "cpu"},
    ):
        assert pass_key(config_of(**knobs)) == pass_key(plain)
    assert pass_key(config_of(precision="bf16")) != pass_key(plain)


def test_a_budget_of_recomputation_lies_between_all_and_nothing() -> None:
    assert interpolation_endpoints(config_of()) == [config_of()]
    within = config_of(activation_checkpointing="none").replace(
        activation_checkpointing="budget-0.5"
    )
    assert [each["activation_checkpointing"] for each in interpolation_endpoints(within)] == [
        "full",
        "none",
    ]


def test_formats_that_trace_alike_are_traced_once() -> None:
    assert KEYS.of(config_of(precision="tf32")) == KEYS.of(config_of(precision="fp32"))
    nested, plain = (config_of(**LORA, quantization=kind) for kind in ("nf4-dq", "nf4"))
    assert KEYS.of(nested) == KEYS.of(plain)
    assert KEYS.plain(nested) != KEYS.plain(plain)  # their weights take other bytes


def test_nothing_is_traced_as_what_a_card_cannot_compute_in() -> None:
    mixed = config_of(precision="fp16-mixed")
    assert KEYS.of(mixed).precision == "bf16-mixed"
    turing = hardware_of(card("t4"))
    for key in (TraceKeys.on(turing, SYMBOLS).of, TraceKeys.on(turing, SYMBOLS).plain):
        assert key(mixed).precision == "fp16-mixed"
        assert key(config_of(precision="tf32")).precision == "fp32"


def test_cards_without_bfloat16_are_predicted() -> None:
    turing = hardware_of(card("t4"))
    configs = [
        canonicalize({"precision": precision, "micro_batch_size": 1}, WORKLOAD, turing)
        for precision in ("fp16-mixed", "fp32")
    ]
    nbytes, seconds = predict_all(WORKLOAD, turing, configs)
    beside = workspace_bytes(turing)
    exact = [peak_of(trace(WORKLOAD, each, turing), turing).nbytes + beside for each in configs]
    assert nbytes == pytest.approx(exact, rel=0.001)
    assert min(seconds) > 0


def test_sizes_are_primes() -> None:
    key = KEYS.of(config_of(**LORA, micro_batch_size=8))
    assert key["micro_batch_size"] == SYMBOLS.samples
    assert key["lora_rank"] == SYMBOLS.rank
    assert KEYS.of(config_of())["lora_rank"] == 0


def test_a_model_of_blocks_is_put_together_from_its_head_and_their_kinds() -> None:
    depth = Depth(whole=8, retained=3, period=1, repeats=6)
    head, blocks = KEYS.others(
        config_of(activation_checkpointing="full", loss="chunked"), depth, by_flash=True
    )
    assert (head["activation_checkpointing"], head["loss"]) == ("none", "chunked")
    assert (blocks["activation_checkpointing"], blocks["loss"]) == ("full", "standard")
    every_second = KEYS.others(
        config_of(activation_checkpointing="alternate"), depth, by_flash=True
    )
    assert [each["activation_checkpointing"] for each in every_second] == ["none", "none", "full"]
    whole = KEYS.others(config_of(activation_checkpointing="alternate"), None, by_flash=False)
    assert [each["activation_checkpointing"] for each in whole] == ["alternate"]


def test_flash_is_traced_by_itself_where_it_is_not_what_sdpa_takes_anyhow() -> None:
    flash = config_of(attention="flash", precision="bf16")
    for by_flash, traced in ((True, "sdpa"), (False, "flash")):
        head, blocks = KEYS.others(
            flash, Depth(whole=8, retained=3, period=1, repeats=6), by_flash=by_flash
        )
        assert (head["attention"], blocks["attention"]) == ("sdpa", traced)


def test_ligers_kernels_change_the_blocks_and_the_head_but_not_what_the_weights_are() -> None:
    liger = config_of().replace(kernels="liger")
    assert KEYS.plain(liger) == KEYS.plain(config_of())
    keys = KEYS.others(liger, Depth(whole=8, retained=3, period=1, repeats=6), by_flash=True)
    assert {each["kernels"] for each in keys} == {"liger"}
