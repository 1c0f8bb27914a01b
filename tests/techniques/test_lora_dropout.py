"""lora_dropout: the share of inputs that adapters do not see."""

import pytest
from torch import nn

from autofit.techniques import canonicalize, technique_named
from tests import tiny
from tests.techniques.contract import Effect

NUMBERS = (0.1, 0.5)


def beside(value):
    return {"lora_rank": 4}


def rates(model) -> list[float]:
    return [module.p for module in model.modules() if isinstance(module, nn.Dropout) and module.p]


def shows(effect: Effect) -> None:
    adapters = [module for module in effect.setup.model.modules() if hasattr(module, "lora_A")]
    assert rates(effect.setup.model) == [effect.value] * len(adapters) != []
    assert rates(effect.off.model) == []
    assert effect.trace.ran("bernoulli") or effect.trace.ran("dropout")
    assert not (effect.off_trace.ran("bernoulli") or effect.off_trace.ran("dropout"))


def test_it_means_nothing_without_a_rank_and_0_is_none() -> None:
    assert (
        canonicalize({"lora_dropout": 0.1}, tiny.llama_workload(), tiny.CPU)["lora_dropout"] is None
    )
    assert (
        canonicalize({"lora_dropout": 0.0, "lora_rank": 4}, tiny.llama_workload(), tiny.CPU)[
            "lora_dropout"
        ]
        is None
    )


@pytest.mark.parametrize("value", [1, -0.1, True, "half"])
def test_only_shares(value: object) -> None:
    assert not technique_named("lora_dropout").accepts(value, tiny.CPU)
