"""data_parallel_shard: what the replicas leave, checked where it is written out."""

import pytest

from autofit.core.errors import InputError
from autofit.core.layout import Layout
from autofit.techniques import canonicalize
from tests.techniques.test_data_parallel import EIGHT, WORKLOAD, canonical

FSDP = {"data_parallel": "fsdp"}


@pytest.mark.parametrize(
    ("knobs", "layout"),
    [
        ({}, Layout(8, 1)),
        (FSDP, Layout(1, 8)),
        (FSDP | {"data_parallel_replicate": 2}, Layout(2, 4)),
    ],
)
def test_the_devices_are_divided(knobs: dict[str, object], layout: Layout) -> None:
    config = canonical(**knobs)
    assert Layout.of(config) == layout
    assert config["micro_batch_size"] == 2
    assert canonicalize(dict(config), WORKLOAD, EIGHT) == config


def test_a_number_that_contradicts_the_others_is_told() -> None:
    with pytest.raises(
        InputError,
        match="data_parallel_shard 2 x data_parallel_replicate 1 is not the number of dev",
    ):
        canonical(**FSDP, data_parallel_shard=2)
