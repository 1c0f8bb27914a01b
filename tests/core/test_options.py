"""SearchOptions: what contradicts itself or makes no sense is said where it comes in."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import InputError
from autofit.core.options import parse_settings, search_options, seconds_of


def test_the_defaults() -> None:
    options = search_options()
    assert options.workers is None
    assert (options.trials, options.time_limit, options.tolerance, options.margin) == (
        40,
        None,
        0.03,
        0.05,
    )
    assert options.wanted_device is None
    assert dict(options.set) == {}
    assert options.store


@pytest.mark.parametrize(
    ("given_options", "device"),
    [
        ({"gpu_mem": 24}, "cuda"),
        ({"gpu": "a100-80gb"}, "cuda"),
        ({"mem": 4}, "cpu"),
        ({"device": "cpu"}, "cpu"),
        ({"device": "cpu", "mem": 4}, "cpu"),
        ({"device": "cuda", "gpu_mem": 4}, "cuda"),
        ({"host_mem": 4}, None),
    ],
)
def test_the_device_is_said_or_implied_by_the_budget(
    given_options: dict, device: str | None
) -> None:
    assert search_options(**given_options).wanted_device == device


CONTRADICTIONS = [
    {"gpu_mem": 24, "mem": 4},
    {"gpu": "h100", "gpu_mem": 24},
    {"device": "cpu", "gpu_mem": 24},
    {"device": "cpu", "gpu": "h100"},
    {"device": "cuda", "mem": 4},
    {"gpu": "h100", "mem": 4},
]


@pytest.mark.parametrize("given_options", CONTRADICTIONS, ids=lambda options: "+".join(options))
def test_two_budgets_contradict_each_other(given_options: dict) -> None:
    with pytest.raises(InputError) as caught:
        search_options(**given_options)
    assert caught.value.remedy == "Use --gpu-mem for a GPU, or --device cpu --mem."


def test_every_pair_of_words_about_the_device_agrees_or_is_refused() -> None:
    words = [{"gpu_mem": 24}, {"gpu": "h100"}, {"mem": 4}, {"device": "cpu"}, {"device": "cuda"}]
    for one, other in itertools.combinations(words, 2):
        both = one | other
        if len(both) == 1 or both in CONTRADICTIONS:
            continue
        assert search_options(**both).wanted_device == search_options(**one).wanted_device


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        ({"gpu_memm": 24}, "unknown option 'gpu_memm'. Did you mean 'gpu_mem'?"),
        ({"device": "tpu"}, "the device must be cpu or cuda, not 'tpu'."),
        (
            {"gpu_mem": "lots"},
            "the GPU memory must be a number of GiB, not 'lots'. For example 24.",
        ),
        ({"mem": 0}, "the memory must be more than 0 GiB, not 0. For example 24."),
        ({"host_mem": -1}, "the host memory must be more than 0 GiB, not -1. For example 24."),
        (
            {"margin": 1},
            "the margin must be a fraction from 0 to below 1, not 1.0. For example 0.05.",
        ),
        (
            {"margin": float("nan")},
            "the margin must be a fraction from 0 to below 1, not nan. For example 0.05.",
        ),
        ({"prefer": "fats"}, "unknown preference 'fats'. Did you mean 'fast'?"),
        ({"tolerance": -0.1}, "the tolerance must be a fraction from 0 to below 1, not -0.1."),
        ({"trials": 0}, "the number of trials must be at least 1, not 0."),
        ({"workers": 0}, "the number of workers must be at least 1, not 0."),
        ({"devices": "two"}, "devices must be a whole number from 1 to 1024, not 'two'."),
        ({"nodes": 0}, "nodes must be a whole number from 1 to 1024, not 0."),
        ({"time_limit": 0}, "the time limit must be more than 0 s, not 0.0. For example 10m."),
        ({"time_limit": "0s"}, "the time limit must be more than 0 s, not 0.0. For example 10m."),
        (
            {"time_limit": float("nan")},
            "the time limit must be more than 0 s, not nan. For example 10m.",
        ),
        ({"time_limit": "soon"}, "a time cannot be 'soon'. For example 90s, 10m or 1h."),
        ({"resume": True}, "to resume, the run directory must be named. Add --out DIR."),
    ],
)
def test_what_makes_no_sense(given_options: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        search_options(**given_options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "given_options", [{"trials": "many"}, {"set": 5}, {"out": 7}, {"seed": 1.5}]
)
def test_wrong_types_name_the_option(given_options: dict) -> None:
    (name,) = given_options
    with pytest.raises(InputError, match=f"{name} cannot be "):
        search_options(**given_options)


def test_one_value_fixes_a_knob_and_several_narrow_it() -> None:
    options = search_options(
        set={"precision": "bf16", "lora_rank": [8, 16], "optimizer_in_backward": True, "x": None}
    )
    assert options.set == {
        "precision": ("bf16",),
        "lora_rank": (8, 16),
        "optimizer_in_backward": (True,),
        "x": (None,),
    }
    assert type(options.set["optimizer_in_backward"][0]) is bool
    assert type(options.set["lora_rank"][0]) is int


def test_paths_and_numbers_as_text_are_taken() -> None:
    options = search_options(out="runs/x", resume=True, gpu_mem="24", time_limit="1.5h")
    assert (options.out, options.gpu_mem, options.time_limit) == (Path("runs/x"), 24.0, 5400.0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 m ", 120), ("0.5", 0.5)],
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@given(st.integers(0, 10**6), st.sampled_from([("s", 1), ("m", 60), ("h", 3600)]))
def test_units_of_time(number: int, unit: tuple[str, int]) -> None:
    assert seconds_of(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize(
    "text", ["", "m", "-5s", "5d", "5 min", "1h30m", "1e3", "nan", "5s\n6s", "\u0661\u0660m"]
)
def test_no_times(text: str) -> None:
    with pytest.raises(InputError, match="a time cannot be"):
        seconds_of(text)


def test_settings_are_values_of_yaml() -> None:
    assert parse_settings(
        [
            "precision=bf16,fp32",
            "lora_rank = 8, 16",
            "compile=true",
            "rate=1.5",
            "lora_targets=null",
        ]
    ) == {
        "precision": ("bf16", "fp32"),
        "lora_rank": (8, 16),
        "compile": (True,),
        "rate": (1.5,),
        "lora_targets": (None,),
    }
    assert parse_settings([]) == {}


@pytest.mark.parametrize("setting", ["precision", "=fp32", " =fp32", "precision=", "precision= "])
def test_settings_of_another_form(setting: str) -> None:
    with pytest.raises(InputError, match="is not knob=value"):
        parse_settings([setting])
