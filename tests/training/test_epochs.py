"""A run that goes on sees the batches, and draws the random numbers, that it would have without the stop."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autofit.core.errors import InputError
from autofit.training import json_state, random_state
from autofit.training.epochs import Epochs

CPU = torch.device("cpu")
PER_PASS = 4


def shuffled() -> Any:
    return DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)


class ByPythonAndNumpy:
    """Shuffles as plain Python does, and adds noise from numpy."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(range(PER_PASS))
        random.shuffle(order)
        for place in order:
            yield torch.tensor([place, float(np.random.rand())])


class Stateful:
    """What follows torchdata's protocol: its state is that of the pass under way, and the next pass begins there."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.given = 0
        self.put_there = False
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.put_there:
            self.order, self.given = torch.randperm(PER_PASS).tolist(), 0
        self.put_there = False
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        while self.given < PER_PASS:
            self.given += 1
            self.read += 1
            yield torch.tensor([self.order[self.given - 1], float(torch.rand(()))])

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.given, self.put_there = state["order"], state["given"], True


def taken(passes: Epochs, count: int) -> list[torch.Tensor]:
    """Batches, and what a model would draw beside each."""
    found = []
    for _ in range(count):
        batch = next(passes)
        found.append(torch.cat([*(batch if isinstance(batch, list) else [batch]), torch.rand(1)]))
    return found


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, one, other))
    assert len(one) == len(other)


@pytest.mark.parametrize("stopped", [0, 1, 4, 6, 8])
@pytest.mark.parametrize("loader", [shuffled, ByPythonAndNumpy, Stateful])
def test_it_goes_on_where_it_stopped(loader: Any, stopped: int) -> None:
    torch.manual_seed(0)
    passes = Epochs(loader(), seed=5)
    taken(passes, stopped)
    state, random_numbers = passes.state(), random_state.capture(CPU)
    wanted = taken(passes, 7)
    again = Epochs(loader(), seed=5)
    random_state.restore(random_numbers, CPU)
    again.skip(stopped, state if stopped else None, CPU)
    assert_same(taken(again, 7), wanted)


def test_a_loader_that_takes_its_place_is_not_read_up_to_there() -> None:
    passes = Epochs(Stateful(), seed=0)
    taken(passes, 3)
    loader = Stateful()
    again = Epochs(loader, seed=0)
    again.skip(3, passes.state(), CPU)
    assert loader.read == 0
    next(again)
    assert loader.read == 1


def test_every_pass_has_an_order_of_its_own() -> None:
    passes = Epochs(shuffled(), seed=0)
    orders = {tuple(torch.cat([next(passes)[0] for _ in range(PER_PASS)]).tolist()) for _ in range(5)}
    assert len(orders) == 5


def test_a_place_that_only_the_former_loader_could_tell_is_counted_instead() -> None:
    passes = Epochs(Stateful(), seed=0)
    taken(passes, 3)
    assert Epochs(shuffled(), seed=0).state() is None
    whole = Epochs(shuffled(), seed=0)
    wanted = [next(whole) for _ in range(5)][3:]
    again = Epochs(shuffled(), seed=0)
    again.skip(3, passes.state(), CPU)
    assert [next(again)[0].tolist() for _ in range(2)] == [batch[0].tolist() for batch in wanted]


def test_its_state_is_read_back_without_running_code() -> None:
    passes = Epochs(Stateful(), seed=0)
    taken(passes, 6)
    assert json_state.loads(json.dumps(json_state.encoded(passes.state()))) == passes.state()


def test_a_loader_that_is_empty() -> None:
    with pytest.raises(InputError, match="a pass over the loader gave no batch"):
        next(Epochs([], seed=0))
