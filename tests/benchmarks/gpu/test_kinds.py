"""Kinds of configs, and how predictions of each compare."""

import pytest

from benchmarks.gpu.kinds import by_kind, kind_of, kinds_table, mean_ratio
from tests.benchmarks.gpu.rows import case

ADAPTED = {"precision": "bf16", "lora_rank": 16}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"precision": "bf16", "lora_rank": 0}, "full"),
        ({"precision": "fp8"}, "full, fp8"),
        (ADAPTED, "LoRA on 16 bits, resident"),
        ({**ADAPTED, "quantization": "nf4", "parameter_offload": "cpu"}, "LoRA on nf4, streamed"),
        (
            {**ADAPTED, "quantization": "none", "compile": "default"},
            "LoRA on 16 bits, resident, compiled",
        ),
    ],
)
def test_a_kind_says_where_the_time_of_a_step_goes(config: dict[str, object], kind: str) -> None:
    assert kind_of(config) == kind


def test_ratios_are_geometric_means_of_each_kind() -> None:
    # a step takes 10 s
    rows = [case(step=20.0, speed=100.0), case(step=5.0, speed=100.0), {"failed": "x"}]
    assert mean_ratio(by_kind(rows)["full"]) == pytest.approx(1.0)
    table = kinds_table(rows)
    assert table is not None
    assert table.rows == [["full", "2", "1.00", "0.50", "2.00", "0.000%"]]
    assert kinds_table([{"failed": "x"}]) is None
