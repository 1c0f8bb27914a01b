"""Degrees of a config, and into how many parts a batch goes."""

import pytest

from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.layout import Layout, fitted_to, samplers

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


def test_a_config_for_another_number_of_devices() -> None:
    hybrid = {
        "data_parallel": "fsdp",
        "data_parallel_replicate": 2,
        "data_parallel_shard": 4,
        "reshard_after_forward": True,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
    }
    assert fitted_to(hybrid, 8, 32) == hybrid
    kept = {"data_parallel": "fsdp", "reshard_after_forward": True}
    assert fitted_to(hybrid, 4, 32) == kept | {"data_parallel_replicate": 2, "micro_batch_size": 4}
    assert fitted_to(hybrid, 3, 12) == kept | {"micro_batch_size": 4}
    assert fitted_to(hybrid, 16, 32) == kept | {"data_parallel_replicate": 2, "micro_batch_size": 2}
    assert fitted_to(hybrid, 1, 32) == {"micro_batch_size": 4}


def test_a_config_of_one_device_stays_as_it_is() -> None:
    odd = {"micro_batch_size": 3, "data_parallel": None}
    assert fitted_to(odd, 1, 8) == odd, "what does not divide the batch is told where it is used"
    assert fitted_to({"data_parallel": "ddp"}, 2, 8) == {"data_parallel": "ddp"}


def test_split_layers_alone_are_shards_too_on_another_number_of_devices() -> None:
    alone = {"data_parallel": "none", "data_parallel_replicate": 1, "tensor_parallel": 4, "micro_batch_size": 8}
    assert fitted_to(alone, 4, 8) == alone
    kept = {"data_parallel": "fsdp", "data_parallel_replicate": 1, "tensor_parallel": 4}
    assert fitted_to(alone, 8, 8) == kept | {"micro_batch_size": 4}
    assert fitted_to(alone, 1, 8) == {"micro_batch_size": 8}
    assert fitted_to({"tensor_parallel": 2}, 4, 8) == {"tensor_parallel": 2}, "what is not said follows from it"
