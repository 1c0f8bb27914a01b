"""reshard_after_forward: of fsdp alone, and numbers that divide the shards."""

import pytest

from autofit.techniques import refuse, technique_named
from tests.techniques.test_data_parallel import EIGHT, WORKLOAD, canonical
from tests.tiny import CPU

FSDP = {"data_parallel": "fsdp"}


def test_weights_are_given_up_unless_told() -> None:
    assert canonical()["reshard_after_forward"] is None
    assert canonical(**FSDP)["reshard_after_forward"] is True
    assert canonical(**FSDP, reshard_after_forward=False)["reshard_after_forward"] is False
    assert technique_named("reshard_after_forward").choices(EIGHT) == (True, False)
    assert technique_named("reshard_after_forward").choices(CPU) == (None,)


@pytest.mark.parametrize(("value", "works"), [(2, True), (4, True), (3, False), (8, False)])
def test_a_number_is_a_part_of_the_shards(value: int, works: bool) -> None:
    reason = refuse(canonical(**FSDP, reshard_after_forward=value), WORKLOAD, EIGHT)
    assert (reason is None) == works
    assert works or f"{value} is no smaller part of 8 shards" in str(reason)
