"""Degrees of a config, and into how many parts a batch goes."""

from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.layout import Layout, dp_degree, fitted_to, fitted_where

NODE = Hardware("cpu", "a CPU", GIB, GIB, GIB, 2, devices=8, nodes=2)


def test_a_config_of_one_device_has_one_of_each() -> None:
    assert Layout.of({"data_parallel": None}) == Layout(1, 1, 1, 1)
    assert Layout.of({}).world == 1


def test_the_degrees_multiply_to_the_devices() -> None:
    config = {"data_parallel_replicate": 2, "data_parallel_shard": 4, "tensor_parallel": 2}
    layout = Layout.of(config)
    assert (layout.dp_degree, layout.world) == (8, NODE.world)
    assert dp_degree(config, NODE) == layout.dp_degree


def test_degrees_that_do_not_divide_the_devices_are_told() -> None:
    with pytest.raises(InputError, match="is 3, which does not divide 16 devices"):
        dp_degree({"tensor_parallel": 3}, NODE)


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
    alone = {
        "data_parallel": "none",
        "data_parallel_replicate": 1,
        "tensor_parallel": 4,
        "micro_batch_size": 8,
    }
    assert fitted_to(alone, 4, 8) == alone
    kept = {"data_parallel": "fsdp", "data_parallel_replicate": 1, "tensor_parallel": 4}
    assert fitted_to(alone, 8, 8) == kept | {"micro_batch_size": 4}
    assert fitted_to(alone, 1, 8) == {"micro_batch_size": 8}
    assert fitted_to({"tensor_parallel": 2}, 4, 8) == {"tensor_parallel": 2}, (
        "what is not said follows from it"
    )


PAIR = {
    "data_parallel": "fsdp",
    "data_parallel_replicate": 1,
    "data_parallel_shard": 2,
    "micro_batch_size": 6,
}


@pytest.mark.parametrize(
    ("world", "bytes_each", "found"),
    [
        (1, 6, (1, 6)),
        (3, 4, (3, 4)),
        (4, 3, (4, 3)),
        (4, 2, (4, 1)),  # of a part of 3, nothing lies between
        (1, 5, (1, 3)),
        (2, 3, (2, 3)),
        (1, 2, (1, 1)),  # after 3
        (5, 4, (4, 3)),  # among which 12 samples divide
        (4, 0, None),
    ],
)
def test_the_most_devices_and_the_largest_micro_batch_that_fit(
    world: int, bytes_each: int, found: tuple[int, int] | None
) -> None:
    asked: list[tuple[int, int]] = []

    def fits(devices: int, knobs: dict[str, Any]) -> bool:
        asked.append((devices, knobs["micro_batch_size"]))
        return bool(knobs["micro_batch_size"] <= bytes_each)

    answer = fitted_where(PAIR, world, 12, fits)
    assert (answer and (answer[0], answer[1]["micro_batch_size"])) == found
    assert len(asked) == len(set(asked)), "none is asked about twice"


def test_fewer_devices_where_no_micro_batch_fits_on_more() -> None:
    """As without the whole gradients that replicas exchange."""
    found = fitted_where({**PAIR, "data_parallel": "ddp"}, 4, 12, lambda devices, _: devices < 3)
    assert found == (2, {**PAIR, "data_parallel": "ddp"})
    kept = {"micro_batch_size": 6}
    alone = {
        "data_parallel_replicate": 1,
        "data_parallel_shard": 1,
        "tensor_parallel": 2,
        "micro_batch_size": 6,
    }
    assert fitted_where(PAIR, 4, 12, lambda devices, _: devices == 1) == (1, kept)
    assert fitted_where(alone, 4, 6, lambda *_: True) == (
        4,
        {"data_parallel_replicate": 1, "tensor_parallel": 2, "micro_batch_size": 3},
    )
