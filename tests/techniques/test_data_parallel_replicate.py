"""data_parallel_replicate: all devices under ddp, one under fsdp unless told, and only what divides them."""

import pytest

from autofit.core.errors import InputError
from autofit.techniques import canonicalize, technique_named
from tests.techniques.test_data_parallel import EIGHT, WORKLOAD, canonical
from tests.tiny import CPU

FSDP = {"data_parallel": "fsdp"}


def test_what_it_is() -> None:
    assert canonical()["data_parallel_replicate"] == 8
    assert canonical(**FSDP)["data_parallel_replicate"] == 1
    assert canonical(**FSDP, data_parallel_replicate=4)["data_parallel_replicate"] == 4
    assert technique_named("data_parallel_replicate").choices(EIGHT) == (None, 2, 4)


def test_what_it_cannot_be() -> None:
    with pytest.raises(InputError, match="data_parallel_replicate 3 does not divide 8 devices"):
        canonical(**FSDP, data_parallel_replicate=3)
    with pytest.raises(InputError, match="with ddp each of 8 devices is a replica, not 2"):
        canonical(data_parallel="ddp", data_parallel_replicate=2)
    with pytest.raises(
        InputError, match="data_parallel_replicate 2 needs several devices, and there is one"
    ):
        canonicalize({"data_parallel_replicate": 2}, WORKLOAD, CPU)
