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
        passes.done(len(batch[0]) if isinstance(batch, list) else len(batch))
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
    assert again.skip(state, CPU) == []
    assert_same(taken(again, 7), wanted)


def test_a_loader_that_takes_its_place_is_not_read_up_to_there() -> None:
    passes = Epochs(Stateful(), seed=0)
    taken(passes, 3)
    loader = Stateful()
    again = Epochs(loader, seed=0)
    again.skip(passes.state(), CPU)
    assert loader.read == 0
    next(again)
    assert loader.read == 1


def test_every_pass_has_an_order_of_its_own() -> None:
    passes = Epochs(shuffled(), seed=0)
    orders = {
        tuple(torch.cat([next(passes)[0] for _ in range(PER_PASS)]).tolist()) for _ in range(5)
    }
    assert len(orders) == 5


def test_a_place_that_only_the_former_loader_could_tell_is_counted_instead() -> None:
    passes = Epochs(shuffled(), seed=0)
    wanted = taken(passes, 5)[3:]
    state = {
        **Epochs(shuffled(), seed=0).state(),
        "passes": 1,
        "given": 3,
        "samples": 6,
        "loader": {"given": 3},
    }
    again = Epochs(shuffled(), seed=0)
    assert again.skip(state, CPU) == []
    assert [batch[:2].tolist() for batch in taken(again, 2)] == [
        batch[:2].tolist() for batch in wanted
    ]


def test_batches_are_all_that_an_earlier_autofit_counted() -> None:
    whole = Epochs(shuffled(), seed=0)
    wanted = [next(whole)[0].tolist() for _ in range(7)]
    again = Epochs(shuffled(), seed=0)
    again.skip_batches(5, CPU)
    assert [next(again)[0].tolist() for _ in range(2)] == wanted[5:]


def test_its_state_is_read_back_without_running_code() -> None:
    passes = Epochs(Stateful(), seed=0)
    taken(passes, 6)
    assert json_state.loads(json.dumps(json_state.encoded(passes.state()))) == passes.state()


# With another batch size, or other data.


def numbers(samples: int, batch_size: int, *, shuffle: bool = False) -> Any:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=shuffle)


def place_after(loader: Any, batches: int, batch_size: int) -> dict[str, Any]:
    passes = Epochs(loader, seed=3, batch_size=batch_size)
    for _ in range(batches):
        passes.done(len(next(passes)[0]))
    return passes.state()


def seen_by(passes: Epochs, batches: int) -> list[list[int]]:
    return [next(passes)[0].tolist() for _ in range(batches)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batches", [1, 3, 5, 8, 10])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_another_batch_size_sees_every_sample_once_a_pass(
    size: int, batches: int, shuffle: bool
) -> None:
    orders = Epochs(numbers(20, 20, shuffle=shuffle), seed=3)
    wanted = [sample for batch in seen_by(orders, 3) for sample in batch]
    again = Epochs(numbers(20, size, shuffle=shuffle), seed=3, batch_size=size)
    notes = again.skip(place_after(numbers(20, 4, shuffle=shuffle), batches, 4), CPU)
    done = 4 * batches
    seen: list[int] = []
    while len(seen) < 60 - done:
        seen += next(again)[0].tolist()
    assert seen == wanted[done:]
    assert len(notes) == (done % 20 % size != 0)


def test_a_batch_that_was_begun_is_told_of() -> None:
    again = Epochs(numbers(20, 8), seed=3, batch_size=8)
    (note,) = again.skip(place_after(numbers(20, 4), 3, 4), CPU)
    assert note == (
        "training goes on within a batch of 8: its first 4 samples were trained on before, and the next step learns "
        "the rest."
    )
    assert again.batches_left(3, passes=2) == 2 + 3
    assert seen_by(again, 3) == [[12, 13, 14, 15], [16, 17, 18, 19], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_batches_that_only_their_user_can_cut_are_repeated_and_that_is_said() -> None:
    def cut(batch: Any, size: int) -> list[Any]:
        return [[part] for part in batch[0].split(size)]

    again = Epochs(numbers(20, 8), seed=3, batch_size=8, cut=cut)
    (note,) = again.skip(place_after(numbers(20, 4), 3, 4), CPU)
    assert note == "4 samples of a batch of 8 are trained on again: it cannot be cut there."
    assert seen_by(again, 1) == [[8, 9, 10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize(("samples", "follows"), [(24, 12), (16, 12), (8, 0)])
def test_a_data_set_of_another_length_is_told_of(samples: int, follows: int) -> None:
    again = Epochs(numbers(samples, 4), seed=3, batch_size=4)
    notes = again.skip(place_after(numbers(20, 4), 3, 4), CPU)
    assert notes[0].startswith(
        f"the data set has {samples} samples now, and had 20 when the checkpoint was made"
    )
    ended = "the data end after 8 samples of pass 0, before the 12 that were trained on in it: training goes on with"
    assert [note.startswith(ended) for note in notes[1:]] == [True] * (samples < 12)
    assert seen_by(again, 1)[0][0] == follows


def test_the_length_of_a_stream_is_known_after_its_first_pass() -> None:
    def stream(batches: int) -> Any:
        return lambda: iter([[torch.arange(4)]] * batches)

    state = place_after(stream(3), 4, 4)
    assert state["pass_samples"] == 12
    notes = Epochs(stream(5), seed=3, batch_size=4).skip({**state, "pass_samples": 20}, CPU)
    assert notes == []  # not read to its end yet


def test_another_order_is_told_of() -> None:
    state = place_after(numbers(20, 4), 3, 4)
    (note,) = Epochs(numbers(20, 4, shuffle=True), seed=3, batch_size=4).skip(state, CPU)
    assert note.startswith(
        "what was read before the place, after 12 samples of pass 0, is not what the checkpoint says"
    )
    assert Epochs(numbers(20, 4), seed=3, batch_size=4).skip(state, CPU) == []


def test_what_is_drawn_at_random_is_not_taken_for_another_order() -> None:
    """Augmented samples are other ones whenever they are read, since the model draws between them."""
    passes = Epochs(ByPythonAndNumpy(), seed=0, batch_size=2)
    taken(passes, 3)
    np.random.rand()
    passes.done(2)
    state = {**passes.state(), "given": 3, "samples": 6, "last": 1}
    assert Epochs(ByPythonAndNumpy(), seed=0, batch_size=2).skip(state, CPU) == []


def test_a_stateful_loader_goes_on_by_its_own_state_with_another_batch_size() -> None:
    passes = Epochs(Stateful(), seed=0, batch_size=2)
    taken(passes, 3)
    again = Epochs(Stateful(), seed=0, batch_size=4)
    (note,) = again.skip(passes.state(), CPU)
    assert note == (
        "the loader goes on by its own state, saved after 6 samples of pass 0 with batches of 2: if that counts "
        "batches instead of samples, some are skipped or repeated."
    )
    assert torch.equal(next(again)[:1], next(passes)[:1])


class Refusing(Stateful):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("of another batch size")


def test_a_loader_that_refuses_its_own_state_is_read_again() -> None:
    passes = Epochs(Refusing(), seed=0, batch_size=2)
    wanted = taken(passes, 4)[3:]
    again = Epochs(Refusing(), seed=0, batch_size=2)
    (note,) = again.skip(passes.state() | {"given": 3, "samples": 6, "last": None}, CPU)
    assert note == (
        "the loader does not take its own state (ValueError: of another batch size): it is read again up to its place."
    )
    assert float(next(again)[0]) == float(wanted[0][0])


def test_a_diverged_batch_is_not_counted() -> None:
    passes = Epochs(numbers(20, 4), seed=3, batch_size=4)
    passes.done(len(next(passes)[0]))
    next(passes)
    assert passes.position == "batch 1 of pass 0"
    state = passes.state()
    assert (state["given"], state["samples"], state["last"]) == (1, 4, None)


def test_a_loader_that_is_empty() -> None:
    with pytest.raises(InputError, match="a pass over the loader gave no batch"):
        next(Epochs([], seed=0))
