"""Config behaves as a value: equal, hashed, pickled and digested by its items and their types."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.config import Config, Value
from autofit.core.constraints import Constraints
from autofit.core.errors import InputError
from autofit.core.knobs import KNOBS
from autofit.core.strict_yaml import dump, parse

names = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=8)
values = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)
items = st.dictionaries(names, values, max_size=6)


@given(items, st.randoms())
def test_the_order_of_the_knobs_does_not_matter(knobs: dict, random: object) -> None:
    shuffled = list(knobs.items())
    random.shuffle(shuffled)
    one, other = Config(knobs), Config(dict(shuffled))
    assert one == other
    assert hash(one) == hash(other)
    assert one.key == other.key
    assert dict(one) == knobs


@given(items, items)
def test_equal_ones_hash_and_digest_alike_and_others_do_not(first: dict, second: dict) -> None:
    one, other = Config(first), Config(second)
    if one == other:
        assert hash(one) == hash(other)
    else:
        assert one.key != other.key


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0, False), (2, 2.0), (None, 0), ("1", 1), ("", None)]
)
def test_values_of_different_types_are_different(one: object, other: object) -> None:
    assert Config(a=one) != Config(a=other)
    assert Config(a=one) != {"a": other}
    assert len({Config(a=one), Config(a=other)}) == 2


@given(items)
def test_a_journey_through_pickle_and_yaml_changes_nothing(knobs: dict) -> None:
    config = Config(knobs)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)


@given(
    st.dictionaries(
        names, st.none() | st.booleans() | st.integers() | st.text("abc-+.0123456789", max_size=8)
    )
)
def test_a_journey_through_yaml_changes_nothing(knobs: dict) -> None:
    config = Config(knobs)
    assert Config(parse(dump(dict(config)), "the test")) == config


def test_the_digest_is_the_same_in_another_process() -> None:
    """Python's own hash of text is not."""
    config = Config(precision="bf16", lora_rank=8, lora_targets=None)
    program = (
        "from autofit.core.config import Config; print(Config(lora_rank=8, "
        "lora_targets=None, precision='bf16').key)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == config.key


def test_it_is_a_mapping() -> None:
    config = Config({"a": 1}, b="x")
    assert (config["a"], config["b"], len(config), list(config)) == (1, "x", 2, ["a", "b"])
    assert config.get("c") is None
    assert config == {"b": "x", "a": 1}
    assert config != {"a": [1], "b": "x"}
    assert config != "a"
    assert repr(config) == "Config(a=1, b='x')"
    with pytest.raises(KeyError):
        config["c"]


def test_it_cannot_be_changed_but_replaced() -> None:
    config = Config(a=1, b=2)
    with pytest.raises(TypeError):
        config["a"] = 3
    assert config.replace(b=3, c=4) == Config(a=1, b=3, c=4)
    assert config == Config(a=1, b=2)


def test_the_mapping_it_was_made_of_stays_the_callers() -> None:
    given_to_it = {"a": 1}
    config = Config(given_to_it)
    given_to_it["a"] = 2
    assert config["a"] == 1


def test_differences_name_both_values() -> None:
    assert Config(a=1, b=2, c=3).differences(Config(a=1, b=5, d=6)) == {
        "b": (2, 5),
        "c": (3, None),
        "d": (None, 6),
    }
    assert Config(a=1).differences(Config(a=1)) == {}


@pytest.mark.parametrize("value", [[1], {"x": 1}, (1,), b"x", object()])
def test_only_plain_values(value: object) -> None:
    with pytest.raises(InputError, match="a must be one plain value"):
        Config(a=value)


def test_only_names_of_text() -> None:
    with pytest.raises(InputError, match=r"^x{500}\.\.\. must be one plain value"):
        Config({"x" * 5000: []})
    with pytest.raises(InputError, match="a knob's name must be text, not 1"):
        Config({1: 2})


def test_knobs_are_attributes_too_and_off_where_a_config_lacks_them() -> None:
    config = Config(lora_rank=8, optimizer=None, mine="on")
    assert (config.lora_rank, config.optimizer) == (8, None)
    assert (config.precision, config.loss, config.head_only) == ("fp32", "standard", False)
    with pytest.raises(AttributeError):
        _ = config.mine  # type: ignore[attr-defined]


def test_every_knob_that_ships_is_an_attribute_and_type_checkers_know_only_knobs() -> None:
    off = Config()
    assert {name: getattr(off, name) for name in KNOBS} == {
        name: knob.off for name, knob in KNOBS.items()
    }
    assert Config.__annotations__.keys() <= KNOBS.keys()


def test_an_attribute_of_a_config_that_is_worked_out_reads_no_other_knob() -> None:
    read: list[str] = []

    def off(name: str) -> Value:
        read.append(name)
        return KNOBS[name].off

    config = Constraints().read_lazily(tuple(KNOBS), off)
    assert config.tensor_parallel is None
    assert set(read) == {"tensor_parallel"}
