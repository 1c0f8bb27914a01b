"""lora_alpha: the scale of what adapters add."""

import pytest

from autofit.techniques import canonicalize, technique_named
from autofit.training.build import build
from tests import tiny
from tests.techniques.contract import Effect

NUMBERS = (1, 24, 0.5)


def beside(value):
    return {"lora_rank": 4}


def scales(model) -> set[float]:
    return {module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")}


def shows(effect: Effect) -> None:
    assert scales(effect.setup.model) == {effect.value / 4}
    assert scales(effect.off.model) == {32 / 4}


def test_it_means_nothing_without_a_rank() -> None:
    assert canonicalize({"lora_alpha": 16}, tiny.llama_workload(), tiny.CPU)["lora_alpha"] is None


@pytest.mark.parametrize("value", [0, -1, True, "two", float("nan"), float("inf")])
def test_only_positive_numbers(value: object) -> None:
    assert not technique_named("lora_alpha").accepts(value, tiny.CPU)


def test_it_is_never_searched_unless_named() -> None:
    assert technique_named("lora_alpha").choices(tiny.CPU) == (None,)


def test_twice_the_rank_unless_set() -> None:
    setup = build(tiny.llama_workload(), {"lora_rank": 16}, tiny.CPU)
    assert scales(setup.model) == {2.0}
    assert setup.config["lora_alpha"] is None
