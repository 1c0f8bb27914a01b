"""Of all knobs beside many ways to divide devices, those that are predicted to be best are searched."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from autofit.core.config import Config, Value
from autofit.core.options import search_options
from autofit.search.space import Space
from autofit.techniques import canonicalize
from autofit.tuning import narrowing
from autofit.tuning.narrowing import (
    Narrowing,
    Row,
    best_layouts,
    worth_searching,
)
from autofit.tuning.space import space_for
from tests.estimate.traced import AMPERE
from tests.tiny import llama_workload
from tests.tuning.searching import TRAITS

HARDWARE, WORKLOAD = AMPERE.of_several(4), llama_workload(8)
LORA = {"lora_rank": 8}


def config(**knobs: Value) -> Config:
    return canonicalize(knobs, WORKLOAD, HARDWARE)


def test_the_fastest_layouts_of_each_tier_that_fit_are_kept() -> None:
    ddp, fsdp = (
        Row(config(data_parallel="ddp"), 9.0, 1.0),
        Row(config(data_parallel="fsdp"), 5.0, 2.0),
    )
    split = Row(config(data_parallel="fsdp", tensor_parallel=2), 6.0, 2.1)
    adapters = Row(config(data_parallel="ddp", **LORA), 4.0, 1.0)
    rows = [ddp, fsdp, split, adapters]
    assert best_layouts(rows, 10.0) == [ddp, adapters]
    assert best_layouts(rows, 8.0) == [fsdp, split, adapters]
    assert best_layouts(rows, 3.0) == [fsdp, adapters]  # where none fits, what needs least
    assert best_layouts([], 3.0) == []


def test_no_more_than_a_few_layouts_are_kept() -> None:
    many = [config(data_parallel="fsdp", data_parallel_replicate=size) for size in (1, 2)]
    many += [config(data_parallel="ddp"), config(data_parallel="fsdp", reshard_after_forward=False)]
    rows = [Row(each, 1.0, 1.0 + place / 100) for place, each in enumerate(many)]
    assert best_layouts(rows, 2.0) == rows[:2]


def test_values_are_kept_that_fit_and_are_not_far_behind() -> None:
    values: dict[str, tuple[Value, ...]] = {
        "loss": ("chunked", "standard"),
        "activation_checkpointing": ("full", "selective", "none"),
        "lora_targets": ("all-linear",),
    }
    rows = [
        Row(config(loss="standard", activation_checkpointing="selective"), 9.0, 1.0),
        Row(config(loss="standard", activation_checkpointing="none"), 11.0, 0.5),  # does not fit
        Row(config(loss="standard", activation_checkpointing="full"), 5.0, 1.3),
        Row(config(loss="chunked", activation_checkpointing="selective"), 8.0, 1.1),
    ]
    kept = worth_searching(values, rows, 10.0, 1.1)
    assert kept == {
        "loss": ("chunked", "standard"),
        "activation_checkpointing": ("selective",),
        # null of them all, as nothing is adapted: nothing is known of it
        "lora_targets": ("all-linear",),
    }
    # Where the first does not fit, what needs no more may fit together, however slow it is.
    kept = worth_searching(values, rows, 7.0, 1.1)
    assert kept["activation_checkpointing"] == ("full", "selective")


@pytest.fixture
def full() -> Space:
    return space_for(search_options(space="full", gpu_mem=24.0), WORKLOAD, HARDWARE)


def test_a_space_that_can_be_predicted_stays_whole(full: Space) -> None:
    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        raise AssertionError("nothing is to be predicted for it")

    assert Narrowing(WORKLOAD, AMPERE, math.inf, predict, seed=0).narrowed(full) == (full, None)


def narrowed_by(
    seconds_of: Callable[[Config], float], full: Space, monkeypatch: pytest.MonkeyPatch
) -> tuple[Space, str, list[Config]]:
    """The narrowed space, the note on it, and what was asked, where all of it fits."""
    monkeypatch.setattr(narrowing, "_WHOLE", 10)
    asked: list[Config] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        return [1.0] * len(configs), [seconds_of(each) for each in configs]

    space, note = Narrowing(WORKLOAD, HARDWARE, 2.0, predict, seed=0).narrowed(full)
    assert note is not None
    return space, note, asked


def test_a_large_space_keeps_its_best_layouts_and_the_values_that_are_fast_there(
    full: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(config: Config) -> float:
        slow = (
            2.0 - (config["tensor_parallel"] == 2) + (config["activation_checkpointing"] == "full")
        )
        slow += 0.1 * (config["micro_batch_size"] == 1)
        return math.nan if config["data_parallel"] == "ddp" else slow

    space, note, asked = narrowed_by(seconds_of, full, monkeypatch)
    assert "tensor_parallel 2" in note
    assert "activation_checkpointing full" in note
    assert space.knobs["tensor_parallel"] == (2,)
    assert "ddp" not in space.knobs["data_parallel"]
    assert "full" in full.knobs["activation_checkpointing"]
    assert "full" not in space.knobs["activation_checkpointing"]
    assert space.knobs["attention"] == full.knobs["attention"]
    elsewhere = [each for each in asked if each["tensor_parallel"] != 2]
    assert {each["optimizer"] for each in elsewhere} == {"adamw"}  # the usual one
    assert {each["optimizer"] for each in asked} > {"adamw"}
    assert {each["fsdp_offload"] for each in elsewhere} == {"none", None}
    assert {each["tensor_parallel"] for each in asked} == {1, 2, 4}


@pytest.mark.parametrize("most", [300_000, 1_000])
def test_more_is_left_out_where_not_all_of_it_could_be_predicted(
    most: int, full: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrowing, "MAX_CONFIGS", most)
    space, *_ = narrowed_by(
        lambda config: 1.0 + 0.08 * (config["optimizer"] != "adamw"), full, monkeypatch
    )
    assert (space.knobs["optimizer"] == ("adamw",)) is (most == 1_000)


def test_less_recomputation_is_kept_where_it_fits_once_weights_are_given_back(
    full: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrowing, "_WHOLE", 10)

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        stays = [each["reshard_after_forward"] is False for each in configs]
        more = [
            {"full": 0.0, "selective": 1.0}.get(str(each["activation_checkpointing"]), 9.0)
            for each in configs
        ]
        seconds = [2.0 - each - 0.05 * kept for each, kept in zip(more, stays, strict=True)]
        return [1.0 + each + kept for each, kept in zip(more, stays, strict=True)], seconds

    space, _ = Narrowing(WORKLOAD, HARDWARE, 2.0, predict, seed=0).narrowed(full)
    assert set(space.knobs["activation_checkpointing"]) == {"full", "selective"}


@pytest.mark.parametrize("size", [1, 2])
def test_dividing_samples_is_predicted_where_the_best_config_computes_one_at_a_time(
    size: int, full: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(config: Config) -> float:
        return 1.0 + (config["micro_batch_size"] != size) + (config["context_parallel"] == 1)

    space, _, asked = narrowed_by(seconds_of, full, monkeypatch)
    assert {each["context_parallel"] for each in asked} == ({1, 2, 4} if size == 1 else {1})
    assert (1 in space.knobs["context_parallel"]) == (size > 1)


@pytest.mark.parametrize(("cap_bytes", "saving"), [(10.0, False), (4.0, True), (1.0, None)])
def test_a_quick_search_looks_at_usual_values_unless_none_of_them_fits(
    full: Space, cap_bytes: float, saving: bool | None
) -> None:
    """And at what saves memory only where it is short."""
    asked: list[Config] = []

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        asked.extend(configs)
        how = [str(each["activation_checkpointing"]) for each in configs]
        nbytes = {"none": 5.0, "alternate": 3.0}
        seconds = {"none": 1.0, "alternate": 1.2, "full": 1.3}
        return [nbytes.get(each, 2.0) for each in how], [seconds.get(each, 1.6) for each in how]

    found = Narrowing(WORKLOAD, HARDWARE, cap_bytes, predict, seed=0).quick(full)
    assert (found is None) is (saving is None)
    assert {each["attention"] for each in asked} == {"sdpa"}
    usual = {"none"} if saving is False else {"none", "full"}
    # Where a usual value saves memory, others are looked at: those that are not slower are searched.
    wanted = usual | {"alternate"} if saving else usual
    tried = {each["activation_checkpointing"] for each in asked}
    assert usual <= tried
    assert ("selective" in tried) is bool(saving)
    assert {each["precision"] for each in asked} == set(full.knobs["precision"])
    if found is not None:
        assert set(found.knobs["activation_checkpointing"]) == wanted
        assert found.knobs["micro_batch_size"] == full.knobs["micro_batch_size"]


def test_a_quick_search_saves_memory_where_only_slow_configs_fit_without(full: Space) -> None:
    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        small = [each["micro_batch_size"] == 1 for each in configs]
        return [5.0 if each else 20.0 for each in small], [1.5 if each else 1.0 for each in small]

    found = Narrowing(WORKLOAD, HARDWARE, 10.0, predict, seed=0).quick(full)
    assert found is not None
    assert found.knobs["activation_checkpointing"] == ("none", "full")


@pytest.mark.parametrize(
    ("batch_norm", "cap", "is_whole"), [(True, 6.0, True), (True, 4.0, False), (False, 6.0, False)]
)
def test_batches_stay_whole_beside_batch_norm_while_that_fits(
    batch_norm: bool, cap: float, is_whole: bool
) -> None:
    workload = replace(WORKLOAD, traits=replace(TRAITS, batch_norm=batch_norm))
    space = space_for(search_options(space="full"), workload, AMPERE)
    sizes = space.knobs["micro_batch_size"]

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        nbytes = [5.0 if each["micro_batch_size"] == sizes[-1] else 1.0 for each in configs]
        return nbytes, [1.0] * len(configs)

    found = Narrowing(workload, AMPERE, cap, predict, seed=0).with_whole_batches(space)
    assert found.knobs["micro_batch_size"] == (sizes[-1:] if is_whole else sizes)


def test_a_quick_search_looks_at_what_pays_on_a_card() -> None:
    """Streamed weights, compiled blocks and Liger's kernels; weights in nf4 cost no trace beside
    nf4-dq."""
    workload = llama_workload(8)
    options = search_options(space="everything", gpu_mem=24.0)
    space = space_for(options, replace(workload, traits=TRAITS), AMPERE)

    def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
        small = [each["quantization"] not in (None, "none") for each in configs]
        return [5.0 if each else 20.0 for each in small], [1.0] * len(configs)

    found = Narrowing(workload, AMPERE, 10.0, predict, seed=0).quick(space)
    assert found is not None
    for knob in ("parameter_offload", "compile", "kernels"):
        assert set(found.knobs[knob]) == set(space.knobs[knob])
        assert len(space.knobs[knob]) > 1
    assert {"nf4", "nf4-dq"} <= set(found.knobs["quantization"])


def test_a_quick_search_leaves_out_optimizers_that_only_save_memory_where_it_suffices() -> None:
    space = space_for(search_options(space="full"), WORKLOAD, AMPERE)
    assert "adamw-8bit" in space.knobs["optimizer"]

    def quick(nbytes: float) -> Space | None:
        def predict(configs: Sequence[Config]) -> tuple[list[float], list[float]]:
            sizes = [1.0 if each["optimizer"] == "adamw-8bit" else nbytes for each in configs]
            return sizes, [1.0] * len(configs)

        return Narrowing(WORKLOAD, AMPERE, 10.0, predict, seed=0).quick(space)

    enough, short = quick(5.0), quick(15.0)
    assert enough
    assert short
    assert "adamw-8bit" not in enough.knobs["optimizer"]
    assert {"adamw", "adamw-master"} <= set(enough.knobs["optimizer"])
    assert "adamw-8bit" in short.knobs["optimizer"]
