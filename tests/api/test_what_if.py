"""What lies around a prediction: single changes, the largest sizes that fit, other cards."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.api import what_if
from autofit.api.estimate import Prediction, estimate, predict
from autofit.core.budget import Budget
from autofit.core.config import Config
from autofit.core.errors import InputError, UntraceableError
from autofit.core.estimate import Estimate, Remedy
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.estimate.cuda_kernels import kernels_of
from autofit.estimate.trace import trace
from autofit.hardware.catalogue import card_names
from tests import tiny

PLAIN = {"precision": "bf16", "micro_batch_size": 2, "activation_checkpointing": "full"}


_known: dict[object, tuple[list[float], list[float]]] = {}


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests ask the same of the estimator, which takes seconds."""
    ask = what_if.predict_all

    def remembered(
        workload: Workload, hardware: Hardware, configs: Sequence[Config], **options: Any
    ) -> Any:
        key = (workload.name, workload.sequence_length, hardware, tuple(configs))
        if key not in _known:
            _known[key] = ask(workload, hardware, configs, **options)
        return _known[key]

    monkeypatch.setattr(what_if, "predict_all", remembered)
    monkeypatch.setattr(
        what_if, "what_helps", lambda *given: (Remedy("memory", ("--gpu-mem", "2"), given[-1], 2),)
    )


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """A small language model on a large card."""
    return predict(tiny.llama_workload(), PLAIN, gpu="rtx-4090")


def within(prediction: Prediction, nbytes: int) -> Prediction:
    """The same prediction for another budget, of which all may be used."""
    budget = Budget(nbytes, nbytes, margin=0.0)
    estimate = dataclasses.replace(prediction.estimate, budget=budget)
    return dataclasses.replace(prediction, budget=budget, estimate=estimate)


def alternating(
    _: object, __: object, configs: Sequence[Config], **options: Any
) -> tuple[list[float], list[float]]:
    """One byte, then three, in one second and then two: predictions that take no time."""
    return [1.0 + 2 * (index % 2) for index in range(len(configs))], [
        1.0 + index % 2 for index in range(len(configs))
    ]


def test_what_would_help_is_asked_of_what_does_not_surely_fit(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_if, "predict_all", alternating)
    monkeypatch.setattr(what_if, "longest", lambda _: None)
    assert what_if.what_if(within(prediction, 64 * 2**30))["remedies"] == []
    (remedy,) = what_if.what_if(within(prediction, 2**20))["remedies"]
    assert remedy["options"] == ["--gpu-mem", "2"]
    assert remedy["config"] == dict(prediction.estimate.config)


def by_knob(found: list[what_if.Change]) -> dict[tuple[str, object], Estimate]:
    return {(each.knob, each.value): each.estimate for each in found}


def test_changes_are_those_of_full_estimates(prediction: Prediction) -> None:
    here = prediction.estimate
    found = by_knob(what_if.changes(prediction))
    for knob, value in (
        ("activation_checkpointing", "none"),
        ("optimizer", "sgd"),
        ("micro_batch_size", 4),
    ):
        full = estimate(tiny.llama_workload(), PLAIN, gpu="rtx-4090", set={knob: value})
        told = found[knob, value]
        assert told.config == full.config
        # The change, not the whole, which the CUDA context would make look alike.
        change = full.allocated_bytes - here.allocated_bytes
        assert told.allocated_bytes - here.allocated_bytes == pytest.approx(change, rel=0.15)
        assert told.step_seconds == pytest.approx(full.step_seconds, rel=0.15)


def test_of_a_mixture_adapters_on_experts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "predict_all", alternating)
    adapted = {"lora_rank": 4, "lora_targets": "attention"}
    found = predict(tiny.mixture_workload(), PLAIN | adapted, gpu="rtx-4090")
    told = what_if.with_experts(found)
    assert told is not None
    assert told["lora_targets"] == "attention+experts"
    # thrice the tensors
    assert told["device_bytes"]["high"] > found.estimate.high + found.estimate.allocated_bytes
    assert told["fits"] == "yes"
    # without adapters
    assert what_if.with_experts(predict(found.workload, PLAIN, gpu="rtx-4090")) is None
    all_of_it = PLAIN | adapted | {"lora_targets": "attention+experts"}
    assert what_if.with_experts(predict(found.workload, all_of_it, gpu="rtx-4090")) is None


def test_changes_are_single_and_legal_and_leave_the_config_out(prediction: Prediction) -> None:
    here = prediction.estimate.config
    for change in what_if.changes(prediction):
        differing = set(change.estimate.config.differences(here)) - {
            "gradient_accumulation_steps",
            "lora_targets",
        }
        assert differing == {change.knob}
        assert not str(change.value).startswith("budget-")  # which only a compiler can keep


def test_the_faster_ones_come_first_and_what_does_not_fit_last(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = what_if.changes(prediction)
    assert [each.estimate.step_seconds for each in whole] == sorted(
        each.estimate.step_seconds for each in whole
    )
    # Of a model this small, libraries take more than activations, which differ between configs.
    monkeypatch.setattr(what_if, "predict_all", alternating)
    tight = what_if.changes(within(prediction, prediction.estimate.high))
    verdicts = [each.estimate.verdict for each in tight]
    assert verdicts == sorted(verdicts, key=("yes", "maybe", "no").index)
    assert {"yes", "no"} <= set(verdicts)


def test_a_speed_that_is_not_known_is_not_made_up(prediction: Prediction) -> None:
    untimed = dataclasses.replace(prediction.estimate, step_seconds=None, samples_per_second=None)
    untimed = dataclasses.replace(untimed, tokens_per_second=None)
    for change in what_if.changes(dataclasses.replace(prediction, estimate=untimed)):
        assert change.estimate.step_seconds is change.estimate.tokens_per_second is None


def test_where_a_space_cannot_be_predicted_nothing_is_said_of_it(
    prediction: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **options: Any) -> None:
        raise UntraceableError("no primes are left")

    monkeypatch.setattr(what_if, "predict_all", fails)
    assert what_if.what_if(prediction)["alternatives"] == []
    unknown = [math.nan] * 1000
    monkeypatch.setattr(
        what_if, "predict_all", lambda *asked, **options: (unknown[: len(asked[2])],) * 2
    )
    assert what_if.what_if(prediction)["alternatives"] == []


def test_the_largest_sizes(prediction: Prediction) -> None:
    assert what_if.what_if(prediction)["largest"] == {
        "micro_batch_size": 4,
        "lora_rank": 256,
        "sequence_length": 64,  # the most the model takes
    }
    four = what_if.scaled(prediction, prediction.estimate.config, memory=1.0).high
    tight = what_if.what_if(within(prediction, four))["largest"]
    assert tight["micro_batch_size"] == 2
    assert tight["sequence_length"] == 16
    none = what_if.what_if(within(prediction, prediction.estimate.breakdown["context"]))
    assert none["largest"] == {"micro_batch_size": None, "lora_rank": None, "sequence_length": None}
    assert {each["fits"] for each in none["alternatives"]} == {"no"}


def test_a_model_without_lengths_has_no_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "predict_all", alternating)
    found = what_if.what_if(predict(tiny.mlp_workload(), {}, gpu="rtx-4090"))
    assert found["largest"].keys() == {"micro_batch_size", "lora_rank"}
    assert found["alternatives"]


@pytest.mark.parametrize(
    ("most_that_fits", "most"), [(1000, 4096), (5, 4096), (37, 4096), (4096, 4096), (9999, 100)]
)
def test_the_largest_is_found_to_an_eighth(most_that_fits: int, most: int) -> None:
    asked: list[int] = []

    def room(length: int) -> float:
        asked.append(length)
        return most_that_fits - length

    found = what_if._largest_with(room, 64, most)
    truth = min(most_that_fits, most)
    if truth < what_if._SHORTEST:
        assert found is None
    else:
        assert found is not None
        assert truth * 7 / 8 - 1 <= found <= truth
    assert max(asked) <= most
    assert len(asked) < 11


@given(
    st.integers(16, 100_000),
    st.integers(16, 100_000),
    st.floats(0.0, 1.0),
    st.sampled_from([0.5, 1.0, 1.5, 2.0]),
)
def test_few_lengths_are_tried_however_bytes_grow(
    start: int, truth: int, fixed: float, power: float
) -> None:
    """From a start far too long as well, of what is there whatever the length, and of what is not."""
    asked: list[int] = []

    def nbytes(length: int) -> float:
        return fixed * truth**power + length**power

    def room(length: int) -> float:
        asked.append(length)
        return nbytes(truth) - nbytes(length)

    found = what_if._largest_with(room, start, 2**20)
    assert found is not None
    assert truth * 7 / 8 - 1 <= found <= truth
    assert len(asked) == len(set(asked)) < 20


def test_the_cards_that_a_config_fits() -> None:
    answer = what_if.fitting_cards(tiny.llama_workload(), PLAIN)
    rows = {row["name"]: row for row in answer["cards"]}
    assert rows.keys() == set(card_names())
    sizes = [row["memory_bytes"] for row in answer["cards"]]
    assert sizes == sorted(sizes)
    assert rows["t4"]["fits"] == "no"
    assert "bf16 needs compute capability 8.0" in rows["t4"]["reason"]
    assert rows["t4"]["tokens_per_second"] is None
    alone = estimate(tiny.llama_workload(), PLAIN, gpu="h100")
    assert rows["h100"]["device_bytes"] == {"low": alone.low, "high": alone.high}
    assert rows["h100"]["step_seconds"] == pytest.approx(alone.step_seconds)


def test_each_generation_of_cards_is_predicted_as_itself() -> None:
    config = {"precision": "fp16-mixed", "micro_batch_size": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}  # of 64, as all kernels can
    workload = tiny.llama_workload(
        sequence_length=4096, hidden_size=512, max_position_embeddings=4096, **heads
    )
    rows = {row["name"]: row for row in what_if.fitting_cards(workload, config)["cards"]}
    for name in ("t4", "a100-40gb", "rtx-4090", "h100", "b200"):
        alone = estimate(workload, config, gpu=name)
        assert rows[name]["device_bytes"] == {"low": alone.low, "high": alone.high}, name
        assert rows[name]["step_seconds"] == alone.step_seconds, name


def test_several_of_a_card_are_predicted_as_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Hardware] = []

    def counted(workload: Workload, config: Config, hardware: Hardware) -> Any:
        traced.append(hardware)
        return trace(workload, config, hardware)

    monkeypatch.setattr(what_if, "trace", counted)
    workload = tiny.llama_workload()
    answer = what_if.fitting_cards(workload, devices=(4, 1, 8), link="nvlink4")
    kinds = [(kernels_of(each), each.world) for each in traced]
    assert len(kinds) == len(set(kinds))  # once for all cards that run the same kernels
    assert {world for _, world in kinds} == {1, 4}
    assert [each["config"]["data_parallel"] for each in answer["configs"]] == [None, "fsdp"]
    rows = {(row["name"], row["devices"]): row for row in answer["cards"]}
    assert rows.keys() == {(name, devices) for name in card_names() for devices in (1, 4, 8)}
    alone = estimate(workload, gpu="h100", devices=4, link="nvlink4")
    assert rows["h100", 4]["device_bytes"] == {"low": alone.low, "high": alone.high}
    assert rows["h100", 4]["tokens_per_second"] == pytest.approx(alone.tokens_per_second)
    assert rows["h100", 8]["fits"] == "no"
    assert "8 devices" in rows["h100", 8]["reason"]  # of which 4 samples are too few
    fitting = [row["tokens_per_second"] for row in answer["cards"] if row["fits"] == "yes"]
    assert fitting == sorted(fitting, reverse=True)
    assert [row["fits"] for row in answer["cards"][: len(fitting)]] == ["yes"] * len(fitting)


def test_a_config_is_fitted_to_each_number_of_devices() -> None:
    config = PLAIN | {"data_parallel": "fsdp"}
    answer = what_if.fitting_cards(
        tiny.llama_workload(), config, gpu="a100-40gb", devices=("1", "4")
    )
    told = [
        (each["config"]["data_parallel"], each["config"]["micro_batch_size"])
        for each in answer["configs"]
    ]
    assert told == [(None, 2), ("fsdp", 1)]
    with pytest.raises(InputError, match="3 devices"):
        what_if.fitting_cards(tiny.llama_workload(), config, gpu="h100", devices=3)


def test_what_training_costs() -> None:
    prices = {"h100": 3.6, "a100-80gb": 0, "t4": 1}
    answer = what_if.fitting_cards(tiny.llama_workload(), PLAIN, prices=prices)
    assert answer["cards"][0]["name"] == "a100-80gb"
    assert answer["cards"][0]["dollars_per_billion_tokens"] == 0
    second = answer["cards"][1]
    assert second["name"] == "h100"
    assert second["dollars_per_billion_tokens"] == pytest.approx(
        0.001 / second["tokens_per_second"] * 1e9
    )
    assert second["dollars_per_million_samples"] is None
    costs = {row["name"]: row["dollars_per_billion_tokens"] for row in answer["cards"]}
    assert costs["l40s"] is costs["t4"] is None  # without a price, and without a speed
    (row,) = what_if.fitting_cards(
        tiny.mlp_workload(), gpu="h100", devices=2, nodes=2, prices=prices
    )["cards"]
    assert row["dollars_per_billion_tokens"] is None
    assert row["dollars_per_million_samples"] == pytest.approx(
        4 * 0.001 / row["samples_per_second"] * 1e6
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prices": {"h101": 1.0}}, "unknown GPU 'h101'"),
        (
            {"prices": {"h100": -1}},
            "the price of h100 must be dollars an hour, from 0 to 1,000,000, not -1",
        ),
        ({"prices": {"h100": math.nan}}, "the price of h100"),
        ({"prices": {"h100": True}}, "the price of h100"),
        ({"devices": ()}, "devices must be one number or several"),
        ({"devices": (1, 0)}, "devices must be a whole number"),
        ({"devices": "all"}, "a prediction is for any"),
        ({"gpu": "h101"}, "unknown GPU 'h101'"),
        ({"mem": 4}, "unknown option 'mem'"),
    ],
    ids=str,
)
def test_cards_that_are_asked_for_wrongly(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        what_if.fitting_cards(tiny.llama_workload(), PLAIN, **asked)
