from dataclasses import replace
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.estimate.scaling import Symbols
from autofit.estimate.shallow_model import Depth
from autofit.estimate.trace_keys import (
    group_key,
    group_of,
    interpolation_endpoints,
    other_keys,
    pass_key,
    plain_key,
    trace_key,
)
from autofit.techniques import canonicalize
from tests.estimate.traced import AMPERE
from tests.tiny import llama_workload

WORKLOAD = replace(llama_workload(8, 64), traits=None)
SYMBOLS = Symbols.for_sizes({64, 16})
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
    assert trace_key(config_of(precision="tf32"), SYMBOLS) == trace_key(
        config_of(precision="fp32"), SYMBOLS
    )
    nested, plain = (config_of(**LORA, quantization=kind) for kind in ("nf4-dq", "nf4"))
    assert trace_key(nested, SYMBOLS) == trace_key(plain, SYMBOLS)
    assert plain_key(nested, SYMBOLS) != plain_key(plain, SYMBOLS)  # their weights take other bytes


def test_sizes_are_primes() -> None:
    key = trace_key(config_of(**LORA, micro_batch_size=8), SYMBOLS)
    assert key["micro_batch_size"] == SYMBOLS.samples
    assert key["lora_rank"] == SYMBOLS.rank
    assert trace_key(config_of(), SYMBOLS)["lora_rank"] == 0


def test_a_model_of_blocks_is_put_together_from_its_head_and_their_kinds() -> None:
    depth = Depth(whole=8, retained=3, period=1, repeats=6)
    head, blocks = other_keys(
        config_of(activation_checkpointing="full", loss="chunked"), SYMBOLS, depth, by_flash=True
    )
    assert (head["activation_checkpointing"], head["loss"]) == ("none", "chunked")
    assert (blocks["activation_checkpointing"], blocks["loss"]) == ("full", "standard")
    every_second = other_keys(
        config_of(activation_checkpointing="alternate"), SYMBOLS, depth, by_flash=True
    )
    assert [each["activation_checkpointing"] for each in every_second] == ["none", "none", "full"]
    whole = other_keys(
        config_of(activation_checkpointing="alternate"), SYMBOLS, None, by_flash=False
    )
    assert [each["activation_checkpointing"] for each in whole] == ["alternate"]


def test_flash_is_traced_by_itself_where_it_is_not_what_sdpa_takes_anyhow() -> None:
    flash = config_of(attention="flash", precision="bf16")
    for by_flash, traced in ((True, "sdpa"), (False, "flash")):
        head, blocks = other_keys(
            flash, SYMBOLS, Depth(whole=8, retained=3, period=1, repeats=6), by_flash=by_flash
        )
        assert (head["attention"], blocks["attention"]) == ("sdpa", traced)


def test_ligers_kernels_change_the_blocks_and_the_head_but_not_what_the_weights_are() -> None:
    liger = config_of().replace(kernels="liger")
    assert plain_key(liger, SYMBOLS) == plain_key(config_of(), SYMBOLS)
    keys = other_keys(
        liger, SYMBOLS, Depth(whole=8, retained=3, period=1, repeats=6), by_flash=True
    )
    assert {each["kernels"] for each in keys} == {"liger"}
