from dataclasses import replace
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.estimate.peak import recomputed_share
from tests.estimate.traced import AMPERE, transformer
from tests.tiny import CPU, mlp_workload

PLAIN: dict[str, Any] = {
    "activation_checkpointing": "none",
    "activation_offload": "none",
    "quantization": "none",
    "compile": "default",
}


def config_of(**knobs: Any) -> Config:
    return Config({**PLAIN, **knobs})


def test_the_less_is_kept_the_less_is_recomputed_share() -> None:
    kinds = ("none", "alternate", "selective", "full")
    shares = [
        recomputed_share(config_of(activation_checkpointing=kind), transformer(), AMPERE)
        for kind in kinds
    ]
    assert shares == sorted((each for each in shares if each is not None), reverse=True)
    assert shares[-1] == 0.0


@pytest.mark.parametrize(
    "knobs", [{"quantization": "int8"}, {"activation_offload": "cpu"}], ids=str
)
def test_what_compiled_code_cannot_join_leaves_less_of_it(knobs: dict[str, Any]) -> None:
    workload = transformer()
    plain, other = (recomputed_share(config_of(**each), workload, AMPERE) for each in ({}, knobs))
    assert plain is not None
    assert other is not None
    assert other < plain


def test_no_rule_is_made_up() -> None:
    workload = transformer()
    assert recomputed_share(config_of(compile="none"), workload, AMPERE) is None
    assert recomputed_share(config_of(), workload, CPU) is None
    assert recomputed_share(config_of(), mlp_workload(), AMPERE) is None
    assert recomputed_share(config_of(), replace(workload, traits=None), AMPERE) is None
    assert (
        recomputed_share(config_of(activation_checkpointing="budget-0.5"), workload, AMPERE) is None
    )
