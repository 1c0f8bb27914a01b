"""The registry: every file of the package is a knob, a user can add one, and a Config becomes canonical."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit import techniques
from autofit.core.config import Config, Value
from autofit.core.errors import InputError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Stage, Technique
from tests import tiny

WORKLOAD = tiny.transformer_workload(12)
NAMES = [technique.name for technique in techniques.all_techniques()]


class Chatter(Technique):
    """A knob of a user's own, that minds sgd."""

    name = "chatter"
    stage = Stage.COMPILE
    off = "quiet"
    values = ("quiet", "loud")

    def fidelity(self, value: Value) -> int:
        return {"quiet": 1, "loud": 0}[str(value)]

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        return (
            "not beside sgd; use adamw."
            if config["chatter"] == "loud" and config["optimizer"] == "sgd"
            else None
        )


@pytest.fixture
def chatter() -> Iterator[Technique]:
    technique = Chatter()
    techniques.register(technique)
    yield technique
    techniques._registry.pop("chatter")


def test_one_that_takes_the_place_of_a_built_in_is_sent_to_the_probes() -> None:
    before = techniques.technique_named("attention")
    mine = type("Mine", (type(before),), {"__doc__": "Another attention."})()
    try:
        techniques.register(mine)
        assert techniques.technique_named("attention") is mine
        assert mine in techniques.added_techniques()
    finally:
        techniques.register(before)
        techniques._built_in.add("attention")
    assert before not in techniques.added_techniques()


def test_every_module_of_the_package_is_one_knob_of_its_name() -> None:
    import pkgutil

    modules = [info.name for info in pkgutil.iter_modules(techniques.__path__)]
    assert sorted(NAMES) == sorted(modules)


def test_techniques_come_in_the_order_in_which_they_touch_a_run() -> None:
    stages = [technique.stage for technique in techniques.all_techniques()]
    assert stages == sorted(stages)
    assert (
        NAMES.index("precision")
        < NAMES.index("lora_rank")
        < NAMES.index("activation_checkpointing")
    )


def test_every_technique_says_what_it_is() -> None:
    for technique in techniques.all_techniques():
        assert type(technique).__doc__
        for value in technique.values:
            assert technique.accepts(value, tiny.CPU)
            assert isinstance(technique.fidelity(value), int)


def test_a_technique_of_ones_own_joins_in(chatter: Technique) -> None:
    assert techniques.technique_named("chatter") is chatter
    # by its name
    assert (
        next(each for each in techniques.all_techniques() if each.stage is Stage.COMPILE) is chatter
    )
    assert techniques.added_techniques() == [chatter]
    config = techniques.canonicalize({"chatter": "loud"}, WORKLOAD, tiny.CPU)
    assert config["chatter"] == "loud"
    assert techniques.refuse(config, WORKLOAD, tiny.CPU) is None
    refused = techniques.refuse(config.replace(optimizer="sgd"), WORKLOAD, tiny.CPU)
    assert refused == "chatter: not beside sgd; use adamw."


def test_one_of_the_same_name_takes_the_place_of_the_former(chatter: Technique) -> None:
    again = Chatter()
    techniques.register(again)
    assert techniques.technique_named("chatter") is again
    assert techniques.added_techniques() == [again]


def test_the_built_in_ones_are_not_told_to_probes() -> None:
    assert techniques.added_techniques() == []


@pytest.mark.parametrize("missing", ["name", "stage"])
def test_a_technique_without_a_name_or_a_stage_is_refused(missing: str) -> None:
    members = {"name": "half", "stage": Stage.STEP, "off": None}
    members.pop(missing)
    half = type("Half", (Technique,), members)
    with pytest.raises(InputError, match=f"the technique Half has no {missing}"):
        techniques.register(half())
    assert "half" not in [technique.name for technique in techniques.all_techniques()]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"precison": "fp32"}, "unknown knob 'precison'. Did you mean 'precision'?"),
        ({"precision": "bf61"}, "unknown value for precision 'bf61'. Did you mean 'bf16'?"),
        (
            {"precision": None},
            "precision cannot be null. Choose from: fp32, tf32, bf16, bf16-mixed, fp16-mixed, fp8.",
        ),
        (
            {"activation_checkpointing": True},
            "activation_checkpointing cannot be True. It takes none, selective,",
        ),
        (
            {"micro_batch_size": 0},
            "micro_batch_size cannot be 0. It takes a whole number that divides the effective batch",
        ),
        ({"micro_batch_size": True}, "micro_batch_size cannot be True."),
        ({"micro_batch_size": 2.0}, "micro_batch_size cannot be 2.0."),
        ({"lora_rank": -1}, "lora_rank cannot be -1."),
        (
            {"lora_rank": 2000},
            "lora_rank cannot be 2000. It takes a whole number from 0 (train all weights) to 1024.",
        ),
        ({"lora_rank": "many"}, "lora_rank cannot be 'many'. It takes a whole number"),
        (
            {"lora_alpha": -3},
            "lora_alpha cannot be -3. It takes a number above 0, or null for 32.",
        ),
        (
            {"lora_dropout": 1.0},
            "lora_dropout cannot be 1.0. It takes a share from 0 to below 1, or null for none.",
        ),
        ({"lora_rank": False}, "lora_rank cannot be False."),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps cannot be 0."),
        (
            {"micro_batch_size": 5},
            "micro_batch_size 5 does not divide the effective batch of 12. Choose from: 1, 2, 3, 4, 6, 12.",
        ),
        (
            {"micro_batch_size": 4, "gradient_accumulation_steps": 4},
            "gradient_accumulation_steps 4 x micro_batch_size 4 is not the effective batch of 12."
            " Leave it out: it is derived.",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(knobs: dict[str, Value], message: str) -> None:
    with pytest.raises(InputError) as caught:
        techniques.canonicalize(knobs, WORKLOAD, tiny.CPU)
    assert str(caught.value).startswith(message)


def test_settled_configs_name_every_knob() -> None:
    config = techniques.canonicalize({}, WORKLOAD, tiny.CPU)
    assert set(config) == set(NAMES)
    assert config["micro_batch_size"] == 12
    assert config["gradient_accumulation_steps"] == 1
    assert config["lora_targets"] is None


any_knobs = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(techniques.technique_named("precision").values),
        "micro_batch_size": st.sampled_from([None, 1, 2, 3, 4, 6, 12]),
        "activation_checkpointing": st.sampled_from(["none", "full"]),
        "lora_rank": st.sampled_from([0, 1, 8]),
        "lora_targets": st.sampled_from([None, "attention", "all-linear", "all-linear+head"]),
        "optimizer": st.sampled_from(techniques.technique_named("optimizer").values),
        "attention": st.sampled_from(["sdpa", "eager"]),
    },
)


@given(any_knobs)
@settings(deadline=None)
def test_settling_is_idempotent_and_its_batches_make_the_effective_one(
    knobs: dict[str, Value],
) -> None:
    config = techniques.canonicalize(knobs, WORKLOAD, tiny.CPU)
    assert techniques.canonicalize(config, WORKLOAD, tiny.CPU) == config
    assert config["micro_batch_size"] * config["gradient_accumulation_steps"] == 12
    assert (config["lora_targets"] is None) == (config["lora_rank"] == 0)
    for name, value in knobs.items():
        if value is not None and name != "lora_targets":
            assert config[name] == value


def test_packages_beside_torch_are_counted_once() -> None:
    def count(**knobs: Value) -> int:
        config = techniques.canonicalize(knobs, WORKLOAD, tiny.CPU)
        return techniques.optional_packages(config)

    assert count() == 0
    assert count(lora_rank=8) == 1
    assert count(lora_rank=8, lora_alpha=16.0, quantization="nf4") == 2
    assert count(lora_rank=8, quantization="nf4", optimizer="adamw-4bit") == 3


def test_the_faithful_come_before_the_coarse() -> None:
    def rank(**knobs: Value) -> tuple[int, ...]:
        return techniques.fidelity(techniques.canonicalize(knobs, WORKLOAD, tiny.CPU))

    best_first = [
        rank(),
        rank(precision="bf16-mixed"),
        rank(precision="bf16", optimizer="adamw-sr"),
        rank(optimizer="adamw-8bit"),
        rank(lora_rank=64),
        rank(lora_rank=8, lora_targets="all-linear+head"),
        rank(lora_rank=8),
        rank(lora_rank=8, lora_targets="attention"),
        rank(lora_rank=8, precision="bf16"),
        rank(lora_rank=8, precision="bf16", optimizer="adamw-8bit"),
        # These lose most of what full training would learn.
        rank(precision="bf16"),
        rank(precision="bf16", optimizer="adamw-8bit"),
    ]
    assert best_first == sorted(best_first, reverse=True)
    assert len(set(best_first)) == len(best_first)
