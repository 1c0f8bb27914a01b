"""Degrees of a config, and into how many parts a batch goes."""

import pytest

from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.layout import Layout, samplers

NODE = Hardware("cpu", "a CPU", GIB, GIB, GIB, 2, devices=8, nodes=2)


def test_a_config_of_one_device_has_one_of_each() -> None:
    assert Layout.of({"data_parallel": None}) == Layout(1, 1, 1, 1)
    assert Layout.of({}).world == 1


def test_the_degrees_multiply_to_the_devices() -> None:
    config = {"data_parallel_replicate": 2, "data_parallel_shard": 4, "tensor_parallel": 2}
    layout = Layout.of(config)
    assert (layout.samplers, layout.world) == (8, NODE.world)
    assert samplers(config, NODE) == layout.samplers


def test_degrees_that_do_not_divide_the_devices_are_told() -> None:
    with pytest.raises(InputError, match="is 3, which does not divide 16 devices"):
        samplers({"tensor_parallel": 3}, NODE)
