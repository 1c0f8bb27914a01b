"""Random numbers of every kind go on where they were."""

import json
import random

import numpy as np
import pytest
import torch

from autofit.training import json_state, random_state

CPU = torch.device("cpu")


def drawn() -> list[float]:
    return [
        float(torch.rand(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        np.random.normal(),
    ]


def test_what_is_drawn_inside_is_not_missing_outside() -> None:
    random_state.seed_host(3)
    first = drawn()
    second = drawn()
    random_state.seed_host(3)
    assert drawn() == first
    with random_state.preserved(CPU):
        drawn()
    assert drawn() == second


def test_also_after_an_error() -> None:
    random_state.seed_host(0)
    wanted = drawn()
    random_state.seed_host(0)
    with pytest.raises(KeyError), random_state.preserved(CPU):
        drawn()
        raise KeyError
    assert drawn() == wanted


def test_it_is_read_back_without_running_code() -> None:
    np.random.normal()  # of which numpy makes two, and keeps one
    written = json.dumps(json_state.encoded(random_state.capture(CPU)))
    wanted = drawn()
    random_state.restore(json_state.loads(written), CPU)
    assert drawn() == wanted


@pytest.mark.parametrize("seed", [0, -1, 2**40])
def test_seeds_of_any_size(seed: int) -> None:
    random_state.seed_host(seed)
    first = drawn()
    random_state.seed_host(seed)
    assert drawn() == first
    random_state.seed_host(seed + 1)
    assert all(one != other for one, other in zip(drawn(), first, strict=True))


@pytest.mark.gpu
def test_the_devices_own() -> None:
    cuda = torch.device("cuda")
    with random_state.preserved(cuda):
        inside = float(torch.rand((), device=cuda))
    assert float(torch.rand((), device=cuda)) == inside
