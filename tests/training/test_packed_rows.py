"""One row with positions that start again is one sample or several, and the same in all batches of a workload."""

import pickle
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding, DataCollatorWithFlattening

from autofit.core.workload import Workload
from autofit.data.batch import (
    by_rows,
    few_samples,
    has_rows,
    map_tensors,
    repeat_to,
    sample_count,
    samples_of,
    split,
)
from autofit.training.build import build
from autofit.training.step import accumulate
from autofit.training.workload import training_workload, with_known_rows
from tests import tiny

Row = dict[str, torch.Tensor]


def row(*lengths: int) -> Row:
    """Samples of these lengths behind each other."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, 64, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def batch(*rows: Row) -> Row:
    return {name: torch.stack([each[name] for each in rows]) for name in rows[0]}


FILLED = [row(3, 5), row(8), row(2, 2, 4), row(1, 7)]  # to 8 tokens, as packers do
FLATTENED = [[3, 5], [2, 9, 1], [4, 4], [6]]  # the samples of each batch, however long


def flattened() -> list[Any]:
    collate = DataCollatorWithFlattening(return_tensors="pt")
    samples = [[{"input_ids": list(range(1, length + 1))} for length in each] for each in FLATTENED]
    return [collate(each) for each in samples]


# A loader, whether its rows are samples, the most samples of a batch, and the tokens of the longest one.
LOADERS: dict[str, tuple[Any, bool, int, int]] = {
    "two rows, and one at the end": ([batch(*FILLED[:2]), batch(FILLED[2])], True, 2, 8),
    "one row at first, then two": ([batch(FILLED[0]), batch(*FILLED[2:])], True, 2, 8),
    "a DataLoader of single rows": (DataLoader(FILLED, batch_size=1), True, 1, 8),
    "single rows of one length": ([batch(each) for each in FILLED], True, 1, 8),
    "samples in one row": (flattened(), False, 3, 9),
    "one batch of one row": ([batch(FILLED[0])], False, 2, 5),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_other_batches_of_a_loader_say_what_a_row_is(name: str) -> None:
    loader, are_rows, samples, longest = LOADERS[name]
    workload = training_workload(tiny.llama_workload().model(), loader, None)
    assert (workload.split is by_rows) == are_rows
    assert workload.effective_batch_size == samples
    for asked in (1, samples, 3):
        made = workload.batch(asked)
        assert sample_count(made, workload.split) == asked
        if are_rows:
            assert made["input_ids"].shape == (asked, 8)
        elif asked == 1:
            assert made["input_ids"].shape == (1, longest)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_row_of_a_batch_is_one_micro_batch_and_learns_the_same(micro_batch_size: int) -> None:
    model = tiny.llama_workload().model()
    loader = [batch(*FILLED[:2]), batch(*FILLED[2:])]
    workload = training_workload(model, loader, None)
    right = model(**loader[0], use_cache=False).loss.detach()
    setup = build(workload, {"micro_batch_size": micro_batch_size}, tiny.CPU, model=model)
    forwards: list[int] = []
    setup.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    torch.testing.assert_close(accumulate(setup, loader[0]), right)
    part = samples_of(loader[0], 0, 1, workload.split)  # as a probe warms up
    accumulate(setup, part)
    assert len(forwards) == 2 // micro_batch_size + 1
    setup.close()


def test_what_is_known_of_rows_reaches_other_processes() -> None:
    workload = training_workload(
        tiny.llama_workload().model(), LOADERS["a DataLoader of single rows"][0], None
    )
    again = pickle.loads(cloudpickle.dumps(workload))
    assert again.split is by_rows
    assert sample_count(again.batch(2), again.split) == 2


def rows_of(samples: int) -> Row:
    return batch(*[FILLED[0]] * samples)


def one_row_of(samples: int) -> Row:
    return {name: each.unsqueeze(0) for name, each in row(*[4] * samples).items()}


@pytest.mark.parametrize("factory", [rows_of, one_row_of])
def test_a_factory_is_asked_for_samples_and_so_says_what_they_are(factory: Any) -> None:
    workload = with_known_rows(Workload(nn.Identity, factory, effective_batch_size=4))
    for samples in (1, 2, 4):
        made = workload.batch(samples)
        assert sample_count(made) == samples
        parts = list(split(made, 1))
        assert [sample_count(part) for part in parts] == [1] * samples
    assert sample_count(few_samples(workload, 2)) == 2


def test_a_mark_stays_with_what_is_made_of_a_batch() -> None:
    marked = with_known_rows(Workload(nn.Identity, rows_of)).batch(2)
    for made in (
        map_tensors(marked, torch.clone),
        samples_of(marked, 0, 1),
        repeat_to(marked, 3),
        next(split(marked, 1)),
        pickle.loads(pickle.dumps(marked)),
    ):
        assert has_rows(made)
        assert sample_count(made) == len(made["input_ids"])


def test_a_mapping_of_another_type_keeps_it() -> None:
    loader = [BatchEncoding(batch(each)) for each in FILLED]
    workload = training_workload(tiny.llama_workload().model(), loader, None)
    assert workload.split is by_rows
    assert type(workload.batch(3)) is BatchEncoding
    assert [sample_count(part, by_rows) for part in split(workload.batch(3), 2, by_rows)] == [2, 1]
