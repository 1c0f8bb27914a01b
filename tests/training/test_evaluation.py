"""The mean loss of held-out data: whatever the cut, and when memory runs out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autofit.core.errors import InputError
from autofit.training.build import build
from autofit.training.evaluation import EvaluationPlan, check_evaluation, evaluate
from tests import tiny


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_mean_loss_of_a_data_set_does_not_depend_on_the_cut(micro: int) -> None:
    workload = tiny.llama_workload()
    setup = build(workload, {}, tiny.CPU, model=tiny.living(workload))
    setup.micro_batch_size = micro
    batches = [tiny.padded_batch(tiny.LENGTHS), tiny.padded_batch((4, 9))]
    model = tiny.living(workload).eval()
    counts = [sum(max(0, length - 1) for length in tiny.LENGTHS), 3 + 8]
    expected = sum(
        float(model(**batch).loss.detach()) * count
        for batch, count in zip(batches, counts, strict=True)
    )
    assert evaluate(setup, batches) == pytest.approx(expected / sum(counts), rel=1e-5)


def test_evaluating_leaves_the_model_as_it_was() -> None:
    workload = tiny.conv_workload(4)
    setup = build(workload, {}, tiny.CPU)
    before = {key: value.clone() for key, value in setup.model.state_dict().items()}
    evaluate(setup, [workload.batch(4)])
    assert setup.model.training
    assert all(torch.equal(value, before[key]) for key, value in setup.model.state_dict().items())
    assert all(parameter.grad is None for parameter in setup.model.parameters())


@pytest.mark.parametrize("batches", [[], [tiny.padded_batch((0, 1))]])
def test_nothing_to_evaluate_on(batches: list) -> None:
    setup = build(tiny.llama_workload(), {}, tiny.CPU)
    with pytest.raises(InputError, match="there is nothing to evaluate on"):
        evaluate(setup, batches)


def test_a_slice_that_does_not_fit_is_cut_in_half() -> None:
    sizes: list[int] = []

    def hungry(model: nn.Module, batch: Any) -> torch.Tensor:
        sizes.append(len(batch[0]))
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tiny.classify(model, batch)

    plain = tiny.mlp_workload(8)
    setup = build(replace(plain, loss=hungry), {}, tiny.CPU)
    expected = evaluate(build(plain, {}, tiny.CPU), [plain.batch(8), plain.batch(5)])
    assert evaluate(setup, [plain.batch(8), plain.batch(5)]) == pytest.approx(expected, rel=1e-5)
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2, 1]  # what was found to fit is kept


def test_one_sample_that_does_not_fit_is_an_error() -> None:
    def never(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    setup = build(replace(tiny.mlp_workload(4), loss=never), {}, tiny.CPU)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(setup, [setup.workload.batch(4)])


def test_a_look_at_the_evaluation_data_is_put_back() -> None:
    workload = tiny.mlp_workload()
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        TensorDataset(*workload.batch(8)), batch_size=4, shuffle=True, generator=generator
    )
    before = generator.get_state()
    check_evaluation(build(workload, {}, tiny.CPU), EvaluationPlan(loader))
    assert torch.equal(generator.get_state(), before)
