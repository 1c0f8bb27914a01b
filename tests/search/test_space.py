from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.search import space as space_module
from autofit.search.space import KnobChoices, Space, list_spaces, load_space


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_ships_five_spaces_that_say_what_they_allow() -> None:
    spaces = list_spaces()
    assert [space.name for space in spaces] == ["everything", "exact", "full", "lora", "qlora"]
    for space in spaces:
        assert space.description
        assert space.path.read_text(encoding="utf-8").startswith("# ")


def test_all_is_every_choice_and_a_list_is_cut_to_what_is_offered(
    tmp_path: Path, offer: KnobChoices
) -> None:
    text = "description: d\nknobs:\n  micro_batch_size: all\n  precision: [fp8, fp32, bf16]\n  lora_rank: [0]\n"
    space = load_space(write(tmp_path, text), offer)
    assert space == Space(
        "mine",
        "d",
        {
            "micro_batch_size": (1, 2, 4, 8, 16, 32),
            "precision": ("fp32", "bf16"),
            "lora_rank": (0,),
        },
    )


def test_a_list_keeps_names_that_no_choices_hold(tmp_path: Path, offer: KnobChoices) -> None:
    text = "description: d\nknobs:\n  lora_targets: [q_proj+v_proj, all-linear]\n"
    offer = replace(
        offer, check=lambda knob, value: None, named={"lora_targets": ("attention", "all-linear")}
    )
    assert load_space(write(tmp_path, text), offer).knobs == {
        "lora_targets": ("q_proj+v_proj", "all-linear")
    }


def test_values_that_do_not_exist_here_are_left_out_beside_names(
    tmp_path: Path, offer: KnobChoices
) -> None:
    text = "description: d\nknobs:\n  precision: [fp8, fp32, named]\n"
    offer = replace(offer, check=lambda knob, value: None, named={"precision": ("fp8", "fp32")})
    assert load_space(write(tmp_path, text), offer).knobs == {"precision": ("fp32", "named")}


def test_a_list_of_ones_own_keeps_what_is_possible_though_not_worth_searching(
    tmp_path: Path, offer: KnobChoices
) -> None:
    offer = replace(offer, possible=lambda knob: ("fp8", "fp32", "bf16"))
    text = "description: d\nknobs:\n  precision: [fp8, fp32]\n"
    assert load_space(write(tmp_path, text), offer).knobs == {"precision": ("fp8", "fp32")}
    every = load_space(write(tmp_path, text.replace("[fp8, fp32]", "all")), offer)
    assert "fp8" not in every.knobs["precision"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "description: d\nknobs: {precison: all}",
            "unknown knob to search 'precison'. Did you mean 'precision'?",
        ),
        ("description: d\nknob: {precision: all}", "Did you mean 'knobs'?"),
        (
            "description: d\nknobs: {precision: [bf61]}",
            "unknown value for precision 'bf61'. Did you mean 'bf16'?",
        ),
        (
            "description: d\nknobs: {lora_rank: [yes]}",
            "lora_rank cannot be True. Choose from: 8, 16, 64",
        ),
        ("description: d\nknobs: {lora_rank: [8.0]}", "lora_rank cannot be 8.0. Choose from:"),
        ("description: d\nknobs: {precision: []}", "precision has no values."),
        (
            "description: d\nknobs: {precision: bf16}",
            "precision is 'bf16'. Write a list of values, or all.",
        ),
        ("description: d\nknobs: {precision: }", "precision is None."),
        ("description: d\nknobs: {precision: [[bf16]]}", "precision cannot be ['bf16']."),
        ("description: d\nknobs: {precision: [bf16, fp32, bf16]}", "precision lists bf16 twice."),
        (
            "description: d\nknobs: {precision: [fp8]}",
            "this hardware offers none of fp8 for precision. Here it may be",
        ),
        ("description: d\nknobs: {precision: all, precision: all}", "given twice"),
        ("description: d\nknobs: {gradient_accumulation_steps: [1]}", "unknown knob to search"),
        ("description: d\nknobs: [precision]", "has no knobs."),
        ("description: d\nknobs: {}", "has no knobs."),
        ("description: d\nknobs: {1: all}", "has no knobs."),
        ("description: d", "has no knobs."),
        ("knobs: {precision: all}", "has no description."),
        ("description: [d]\nknobs: {precision: all}", "has no description."),
        ("- precision", "should hold a mapping"),
        ("description: [", "cannot be read as YAML"),
    ],
)
def test_refuses_what_is_not_a_space_in_one_sentence(
    tmp_path: Path, offer: KnobChoices, text: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_space(write(tmp_path, text), offer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_knob_that_offers_nothing_here(tmp_path: Path, offer: KnobChoices) -> None:
    bare = KnobChoices(offer.known, lambda knob: (), offer.check)
    for values in ("all", "[bf16]"):
        with pytest.raises(InputError, match="Leave the knob out"):
            load_space(write(tmp_path, f"description: d\nknobs: {{precision: {values}}}"), bare)


@pytest.mark.parametrize("name", ["everthing", "everthing.yaml"])
def test_a_space_that_is_not_there(name: str, offer: KnobChoices) -> None:
    with pytest.raises(InputError, match=r"unknown space .* Did you mean 'everything'\?"):
        load_space(name, offer)


def test_a_folder_is_no_space(tmp_path: Path, offer: KnobChoices) -> None:
    with pytest.raises(InputError, match="unknown space"):
        load_space(tmp_path, offer)


def test_spaces_are_found_in_a_wheel_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "autofit" / "search" / "space.py"
    for folder in (tmp_path / "search_spaces", tmp_path / "autofit" / "search_spaces"):
        folder.mkdir(parents=True)
        (folder / "one.yaml").write_text(
            f"description: in {folder.parent.name}\nknobs: {{precision: all}}"
        )
        monkeypatch.setattr(space_module, "__file__", str(source))
        assert [space.path.parent for space in list_spaces()] == [folder]
    monkeypatch.setattr(
        space_module, "__file__", str(tmp_path / "elsewhere" / "a" / "b" / "space.py")
    )
    assert list_spaces() == ()


def test_overrides_fix_narrow_and_add(offer: KnobChoices) -> None:
    space = Space("s", "d", {"precision": ("bf16", "fp32"), "lora_rank": (0,)})
    changed = space.with_overrides(
        {"precision": ["fp32"], "lora_rank": 4, "optimizer": ("sgd", "adamw")}, offer
    )
    assert changed.knobs == {
        "precision": ("fp32",),
        "lora_rank": (4,),
        "optimizer": ("sgd", "adamw"),
    }
    assert space.knobs == {"precision": ("bf16", "fp32"), "lora_rank": (0,)}


def test_overrides_keep_a_value_that_the_hardware_does_not_offer(offer: KnobChoices) -> None:
    assert Space("s", "d", {}).with_overrides({"precision": ["fp8"]}, offer).knobs == {
        "precision": ("fp8",)
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"precison": ["bf16"]}, "Did you mean 'precision'?"),
        ({"precision": ["bf61"]}, "Did you mean 'bf16'?"),
        ({"precision": []}, "precision has no values."),
        ({"precision": ["bf16", "bf16"]}, "lists bf16 twice"),
        ({"precision": {"bf16": 1}}, "precision cannot be"),
    ],
)
def test_overrides_are_checked(offer: KnobChoices, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Space("s", "d", {}).with_overrides(overrides, offer)
    assert message in str(caught.value)


def test_configs_are_canonical_and_distinct(formula: Any) -> None:
    problem = formula()
    whole = 3 * 6 * 2 * 4 * 1 * 3 * 2
    assert len(problem.configs) == len(set(problem.configs)) == whole
    assert all(
        (config["lora_targets"] is None) == (config["lora_rank"] == 0) for config in problem.configs
    )
    targets = {"lora_targets": ("all-linear", "attention")}
    doubled = Space("s", "d", {**problem.space.knobs, **targets}).configs(
        problem.problem().constraints
    )
    assert len(doubled) == whole * 7 // 4  # of the four ranks, targets mean nothing beside 0


def test_combinations_that_contradict_each_other_are_left_out(formula: Any) -> None:
    constraints = formula().problem().constraints
    space = Space("s", "d", {"micro_batch_size": (3, 4), "lora_rank": (0,)})
    assert [config["micro_batch_size"] for config in space.configs(constraints)] == [4]
    with pytest.raises(InputError, match="micro_batch_size 3 does not divide"):
        Space("s", "d", {"micro_batch_size": (3, 5)}).configs(constraints)
