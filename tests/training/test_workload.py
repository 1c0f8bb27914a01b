"""A loader is read again and again, its own batch is the effective one, and the model beside it is not touched."""

import functools
import random
import weakref
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autofit.core.errors import InputError
from autofit.data.batch import sample_count
from autofit.models.huggingface import HuggingFaceModel
from autofit.training import random_state
from autofit.training.epochs import Epochs
from autofit.training.workload import Peek, batches_of, training_workload, workload_from
from tests import tiny

MODEL = tiny.MLP()


def dataset(samples: int = 10) -> TensorDataset:
    return TensorDataset(*tiny.mlp_workload().batch(samples))


def batches(*sizes: int) -> list[Any]:
    return [tiny.mlp_workload().batch(size) for size in sizes]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(dataset(), batch_size=4),
        batches(4, 4, 2),
        tuple(batches(4, 4, 2)),
        lambda: iter(batches(4, 4, 2)),
    ],
    ids=["DataLoader", "list", "tuple", "function"],
)
def test_every_kind_of_loader_can_be_read_again(loader: Any) -> None:
    for _ in range(2):
        assert [sample_count(batch) for batch in batches_of(loader)] == [4, 4, 2]
    workload = workload_from(MODEL, loader, tiny.classify)
    assert workload.effective_batch_size == 4
    assert sample_count(workload.batch(7)) == 7


class Positioned:
    """A stateful loader that stays where it was read to, as some do."""

    def __init__(self, count: int = 3) -> None:
        self.position = 0
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.count:
            self.position += 1
            yield batches(4)[0]

    def state_dict(self) -> dict[str, int]:
        return vars(self)  # not a copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("position", [0, 1])
def test_a_stateful_loader_is_put_back_to_where_it_was(position: int) -> None:
    loader = Positioned()
    loader.position = position
    workload_from(MODEL, loader, tiny.classify)
    assert loader.position == position
    assert len(list(batches_of(loader))) == 3 - position


def test_a_loader_without_a_state_before_its_first_pass_is_read_as_any_other() -> None:
    class Early(Positioned):
        def state_dict(self) -> dict[str, int]:
            raise RuntimeError("no pass was begun")

    assert workload_from(MODEL, Early(), tiny.classify).effective_batch_size == 4


class Drawing(TensorDataset):
    """Draws from every generator of the process and from three of its own for each sample."""

    def __init__(self) -> None:
        super().__init__(*tiny.mlp_workload().batch(10))
        self.transforms = [{"rng": np.random.default_rng(0)}]
        self.own = random.Random(0)
        self.old = np.random.RandomState(0)
        self.late: torch.Generator | None = None

    def __getitem__(self, index: int) -> Any:
        if self.late is None:
            self.late = torch.Generator().manual_seed(0)
        torch.rand(1), torch.rand(1, generator=self.late)
        random.random(), self.own.random()
        np.random.rand(), self.old.rand(), self.transforms[0]["rng"].random()
        return super().__getitem__(index)


def test_a_look_at_a_loader_draws_nothing() -> None:
    """Neither from the process's generators nor from those of the sampler, the data set, or a function's loader."""
    data = Drawing()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    random_state.seed_host(3)

    def drawn() -> list[float]:
        own = [data.own.random(), data.old.rand(), data.transforms[0]["rng"].random()]
        return [
            *own,
            torch.rand(1).item(),
            random.random(),
            np.random.rand(),
            torch.rand(1, generator=generator).item(),
        ]

    with random_state.preserved(), random_state.generators_preserved(loader):
        wanted = drawn()
    for given in (loader, lambda: iter(loader), functools.partial(iter, loader)):
        workload_from(MODEL, given, tiny.classify)
        assert data.late is None
        with random_state.preserved(), random_state.generators_preserved(loader):
            assert drawn() == wanted


def generator() -> Iterator[Any]:
    yield from batches(4)


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (generator(), "generator"),
        (iter(batches(4)), "list_iterator"),
        (iter(DataLoader(dataset())), "DataLoaderIter"),
    ],
)
def test_what_can_be_read_only_once_is_refused(loader: Any, kind: str) -> None:
    with pytest.raises(
        InputError, match=f"the loader is a .*{kind}, which can be read only once"
    ) as caught:
        workload_from(MODEL, loader, tiny.classify)
    assert "Pass a function that returns it" in caught.value.remedy


def test_refusing_a_generator_takes_nothing_from_it() -> None:
    loader = generator()
    with pytest.raises(InputError):
        batches_of(loader)
    assert len(list(loader)) == 1


@pytest.mark.parametrize("loader", [None, 3, object()])
def test_what_cannot_be_iterated(loader: object) -> None:
    with pytest.raises(InputError, match="the loader must be an iterable of batches, not a"):
        workload_from(MODEL, loader, tiny.classify)


@pytest.mark.parametrize("loader", [[], (), lambda: iter(())])
def test_an_empty_loader(loader: Any) -> None:
    with pytest.raises(
        InputError, match=r"the loader is empty: it gave no batch\. Check the data set\."
    ):
        workload_from(MODEL, loader, tiny.classify)
    with pytest.raises(
        InputError,
        match=r"a pass over the loader gave no batch: it is empty, or can be read only on",
    ):
        next(Epochs(loader, 0))


class Spent:
    """Looks like an iterable, but hands out one and the same iterator."""

    def __init__(self) -> None:
        self.batches = iter(batches(4))

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def test_an_iterable_of_one_pass_is_refused() -> None:
    for loader in (Spent(), Spent().__iter__):
        with pytest.raises(
            InputError,
            match="the loader gives the same list_iterator again, which can be read only o",
        ):
            workload_from(MODEL, loader, tiny.classify)


def test_batches_beside_which_a_loss_must_be_given_are_told_of_at_once() -> None:
    with pytest.raises(
        InputError, match=r"a batch is a tuple of 2, which MLP\.forward\(features\) does not take"
    ):
        workload_from(MODEL, batches(4), None)
    with pytest.raises(InputError, match=r"nn\.MSELoss\(\) is a function of outputs and targets"):
        workload_from(MODEL, batches(4), nn.MSELoss())


def test_batches_that_are_none() -> None:
    with pytest.raises(InputError, match="holds no tensor with samples"):
        workload_from(MODEL, ["a", "b"], tiny.classify)


@pytest.mark.parametrize("model", [tiny.MLP, "llama", None, lambda: tiny.MLP()])
def test_the_model_must_be_a_living_module(model: object) -> None:
    with pytest.raises(
        InputError, match=r"the model must be an nn\.Module or the name of one, not a"
    ):
        workload_from(model, batches(4), tiny.classify)


def test_a_pass_over_a_shuffled_loader_is_one_draw_of_the_users_randomness() -> None:
    """Starting the iterator twice would give another order than the user's own loop sees."""
    loader = DataLoader(dataset(50), batch_size=5, shuffle=True)
    torch.manual_seed(3)
    expected = [batch[0] for batch in loader]
    torch.manual_seed(3)
    assert all(map(torch.equal, expected, [batch[0] for batch in batches_of(loader)]))


def test_epochs_go_round_in_the_loaders_own_order() -> None:
    loader = batches(3, 2, 1)
    stream = Epochs(loader, 0)
    assert [sample_count(next(stream)) for _ in range(8)] == [3, 2, 1, 3, 2, 1, 3, 2]


def token_batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.ones(samples, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_samples_of_many_shapes_are_told_from_those_of_a_few() -> None:
    def varying(*lengths: int) -> bool:
        return workload_from(
            tiny.MLP(), [token_batch(4, length) for length in lengths], tiny.classify
        ).varying

    assert not varying(8, 8, 8)
    assert not varying(*range(8, 16)), "eight buckets"
    assert varying(*range(8, 17))
    batches = [token_batch(size, 8) for size in range(1, 17)]
    assert not workload_from(tiny.MLP(), batches, tiny.classify).varying, "their number is no shape"


def test_the_largest_shape_is_the_one_that_is_probed() -> None:
    loader = [token_batch(4, 8), token_batch(4, 30), token_batch(4, 12)]
    workload = workload_from(tiny.llama()(), loader, None)
    assert workload.batch(2)["input_ids"].shape == (2, 30)
    assert (workload.sequence_length, workload.unit, workload.effective_batch_size) == (
        30,
        "tokens",
        4,
    )


def test_also_when_it_comes_in_a_small_last_batch() -> None:
    workload = workload_from(tiny.llama()(), [token_batch(8, 20), token_batch(1, 30)], None)
    assert workload.batch(8)["input_ids"].shape == (8, 30)
    assert workload.effective_batch_size == 8


def test_only_the_first_batches_of_a_long_loader_are_looked_at() -> None:
    taken: list[int] = []

    def loader() -> Iterator[Any]:
        for number in range(1000):
            taken.append(number)
            yield tiny.mlp_workload().batch(2)

    workload_from(MODEL, loader, tiny.classify)
    assert len(taken) == 64


def test_the_task_of_a_transformers_model_is_known_by_its_name() -> None:
    assert workload_from(tiny.llama()(), [token_batch(2, 8)], None).task == "causal-lm"
    classifier = HuggingFaceModel("tiny", "sequence-classification", tiny.LLAMA)()
    labelled = {
        "input_ids": torch.ones(2, 8, dtype=torch.int64),
        "labels": torch.zeros(2, dtype=torch.int64),
    }
    assert workload_from(classifier, [labelled], None).task == "sequence-classification"
    without = [{"input_ids": torch.ones(2, 8, dtype=torch.int64)}]
    assert workload_from(tiny.llama()(), without, tiny.classify).task == "custom"
    other = workload_from(MODEL, batches(2), tiny.classify)
    assert (other.task, other.name, other.unit, other.sequence_length) == (
        "custom",
        "MLP",
        "samples",
        None,
    )


def test_the_living_model_stays_as_it_is() -> None:
    model = tiny.ConvNet()
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    workload = workload_from(model, [tiny.conv_workload().batch(2)], tiny.classify)
    assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()} == before
    skeleton = workload.model()
    assert skeleton is not model
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}


def test_what_a_probe_gets_holds_no_weights_and_no_loader() -> None:
    model = nn.Sequential(nn.Linear(48, 4096), nn.ReLU(), nn.Linear(4096, 10))
    workload = workload_from(model, DataLoader(dataset(), batch_size=4), tiny.classify)
    pickled = cloudpickle.dumps(workload)
    assert len(pickled) < 0.1 * sum(p.nbytes for p in model.parameters())
    assert sample_count(cloudpickle.loads(pickled).batch(3)) == 3


def test_batches_reach_the_probe_detached() -> None:
    x, y = tiny.mlp_workload().batch(2)
    workload = workload_from(MODEL, [(x.requires_grad_(True), y)], tiny.classify)
    assert not workload.batch(2)[0].requires_grad
    assert x.requires_grad


def test_a_model_that_cannot_be_copied_is_one_sentence() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("cannot be copied")

    with pytest.raises(
        InputError, match="copying the model's structure raised TypeError: cannot be copied"
    ):
        workload_from(Stubborn(48, 10), batches(2), tiny.classify)


# The largest batch.


def test_how_far_to_look_is_the_users_choice() -> None:
    loader = [token_batch(2, 4), token_batch(2, 4), token_batch(2, 9)]
    assert (
        workload_from(tiny.MLP(), loader, tiny.classify, peek=Peek(batches=2)).sequence_length == 4
    )
    assert (
        workload_from(tiny.MLP(), loader, tiny.classify, peek=Peek(batches=3)).sequence_length == 9
    )


def test_the_worst_case_can_be_given() -> None:
    workload = workload_from(
        tiny.MLP(), [token_batch(8, 4)], tiny.classify, peek=Peek(worst_case=token_batch(1, 64))
    )
    assert workload.sequence_length == 64
    assert workload.effective_batch_size == 8  # which the loader says
    assert workload.batch(8)["input_ids"].shape == (8, 64)


@pytest.mark.parametrize("batches", [0, -1, 1.5, True])
def test_looking_at_no_batch(batches: Any) -> None:
    with pytest.raises(InputError, match="peek must be a positive whole number of batches"):
        Peek(batches=batches)


# What is wrong with data and models.


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (
            {"input_ids": torch.ones(2, 4)},
            r"batch 1 of the loader is \{input_ids: .*\}, but the first batch is \{input_ids",
        ),
        (
            (torch.ones(2, 4), torch.ones(2, 4)),
            r"batch 1 of the loader is \(a tensor of 2 dimensions, .*\), but",
        ),
        (
            {"input_ids": torch.ones(2), "labels": torch.ones(2, 4)},
            "input_ids: a tensor of 1 dimensions",
        ),
        ({"input_ids": [1, 2], "labels": torch.ones(2, 4)}, "input_ids: a list"),
    ],
)
def test_batches_of_different_structure(odd: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        workload_from(tiny.MLP(), [token_batch(2, 4), odd], tiny.classify)


def test_batches_of_different_length_are_of_one_structure() -> None:
    assert (
        workload_from(
            tiny.MLP(), [token_batch(3, 4), token_batch(1, 7)], tiny.classify
        ).sequence_length
        == 7
    )


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = tiny.MLP()
    with pytest.raises(
        InputError, match=r"weights on the meta device: there is nothing to train\. Load them first"
    ):
        workload_from(model, [token_batch(2, 4)], None)


def test_batches_that_were_looked_at_are_let_go() -> None:
    """Each from a worker of a DataLoader takes shared memory and open files."""
    living: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def loader() -> Iterator[Any]:
        nonlocal most
        for size in (4, 9, 5, 6, 7, 8):
            batch = token_batch(2, size)
            living.append(weakref.ref(batch["input_ids"]))
            most = max(most, sum(each() is not None for each in living))
            yield batch
            del batch

    assert workload_from(tiny.MLP(), loader, tiny.classify).sequence_length == 9
    assert most <= 3  # the largest, the one before, and the one that is made


def test_the_worst_case_must_look_like_a_batch() -> None:
    with pytest.raises(
        InputError, match=r"worst_case is a tensor of 1 dimensions, but the first batch is \{"
    ):
        workload_from(
            tiny.MLP(), [token_batch(2, 4)], tiny.classify, peek=Peek(worst_case=torch.zeros(2))
        )


def test_a_model_whose_weights_have_no_shape_yet() -> None:
    with pytest.raises(
        InputError, match=r"lazy modules, whose weights have no shape yet\. Call it on a batch once"
    ):
        training_workload(nn.Sequential(nn.LazyLinear(3)), batches(2), tiny.classify)


def test_the_largest_of_packed_samples_says_the_shape_and_pieces_of_lists_may_differ_in_number() -> (
    None
):
    def batch(*counts: int) -> dict[str, Any]:
        labels = [{"classes": torch.zeros(n), "boxes": torch.ones(n, 4)} for n in counts]
        return {"features": torch.ones(len(counts), 48), "labels": labels}

    workload = training_workload(
        MODEL, [batch(1, 2, 1, 1), batch(1, 5, 1)], lambda model, batch: model(batch["features"])
    )
    assert workload.effective_batch_size == 4
    assert [len(each["boxes"]) for each in workload.batch(3)["labels"]] == [1, 5, 1]
    assert [len(each["boxes"]) for each in workload.batch(4)["labels"]] == [5] * 4


def test_a_split_of_ones_own_goes_into_the_workload() -> None:
    def pairs(batch: torch.Tensor, size: int) -> list[torch.Tensor]:
        return list(batch.split(2 * size))

    workload = training_workload(
        MODEL, [torch.ones(8, 48), torch.ones(4, 48)], tiny.classify, split=pairs
    )
    assert workload.effective_batch_size == 4
    assert workload.batch(3).shape == (6, 48)
    with pytest.raises(InputError, match="split must be a function"):
        training_workload(MODEL, [torch.ones(8, 48)], tiny.classify, split=3)  # type: ignore[arg-type]


def test_how_much_of_a_loaders_batches_is_padding_is_known() -> None:
    model = tiny.llama_workload().model()
    ids = torch.ones(4, 8, dtype=torch.long)
    masks = [torch.arange(8) < torch.tensor(each)[:, None] for each in ([8, 2, 2, 4], [8, 8, 8, 8])]
    batches = [{"input_ids": ids, "labels": ids, "attention_mask": mask.long()} for mask in masks]
    found = training_workload(model, batches, None)
    assert (found.packing, found.padding) == (False, 16 / 64)
    assert found.description()["padding"] == 0.25
    assert training_workload(model, batches[1:], None).packing is None


# What was not read.


@pytest.mark.parametrize(
    ("lengths", "peek", "is_told"),
    [
        ([4, 8, 4], Peek(batches=2), True),
        ([4, 8, 4], Peek(batches=3), False),
        ([4, 4, 8], Peek(batches=2), False),
        ([4, 8, 4], Peek(batches=2, worst_case=token_batch(2, 9)), False),
    ],
    ids=["longer ones may come", "all are read", "one shape", "worst case"],
)
def test_that_not_all_batches_were_read_is_said(
    lengths: list[int], peek: Peek, is_told: bool
) -> None:
    loader = [token_batch(2, length) for length in lengths]
    notes = training_workload(tiny.MLP(), loader, tiny.classify, peek=peek).notes
    told = "no more than 2 batches of the loader were read to find the longest samples: a longer one may need more"
    assert [note.startswith(told) for note in notes] == [True] * is_told


def test_a_loader_of_unknown_length_may_always_give_longer_samples() -> None:
    def loader() -> Iterator[Any]:
        yield from (token_batch(2, length) for length in (4, 8))

    assert (
        len(training_workload(tiny.MLP(), loader, tiny.classify, peek=Peek(batches=2)).notes) == 1
    )
    assert training_workload(tiny.MLP(), loader, tiny.classify, peek=Peek(batches=3)).notes == ()


def test_samples_that_cannot_be_stacked_name_the_remedy() -> None:
    loader = DataLoader([torch.ones(3), torch.ones(2)], batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match="the loader cannot stack its samples: stack expects each tensor"
    ) as caught:
        workload_from(MODEL, loader, tiny.classify)
    assert "Give a collate_fn that pads them" in caught.value.remedy


def test_batches_of_lists_are_told_what_makes_tensors_of_them() -> None:
    with pytest.raises(
        InputError, match="no tensor with samples along dim 0: ids and labels are lists"
    ) as caught:
        workload_from(MODEL, [{"ids": [[1, 2]], "labels": [[1, 2]]}], tiny.classify)
    assert 'dataset.set_format("torch") makes tensors of lists' in caught.value.remedy
