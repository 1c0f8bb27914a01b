"""What `fit` evaluates, when, and which weights it ends with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.core.errors import InputError
from autofit.training.loop import StepReport
from tests import tiny
from tests.api.fitting import Batch, assert_same, batches, fitted, weights


def accuracy(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (outputs.argmax(-1) == batch[1]).float().mean()


def share_right(model: nn.Module, loader: list[Batch]) -> float:
    """The accuracy over all samples, by hand."""
    assert not model.training
    right = [model(features).argmax(-1) == classes for features, classes in loader]
    return float(torch.cat(right).float().mean())


def uneven() -> list[Batch]:
    """Held-out data in batches of 5 and 3 samples."""
    (features, classes), *_ = batches(1)
    return [(features[:5], classes[:5]), (features[5:], classes[5:])]


def of_loader(model: nn.Module, loader: list[Batch]) -> float:
    return share_right(model, loader)


def test_metrics_are_means_over_samples_of_every_few_steps_and_the_end() -> None:
    trained = fitted(
        steps=5,
        config={"micro_batch_size": 2},
        eval_loader=uneven(),
        eval_every=2,
        metrics={"accuracy": accuracy, "whole": of_loader},
    )
    assert [evaluation.step for evaluation in trained.evaluations] == [2, 4, 5]
    for evaluation in trained.evaluations:
        assert evaluation.metrics["accuracy"] == pytest.approx(evaluation.metrics["whole"])
    last = trained.evaluations[-1]
    trained.model.eval()
    assert last.metrics["whole"] == share_right(trained.model, uneven())

    features = torch.cat([batch[0] for batch in uneven()])
    classes = torch.cat([batch[1] for batch in uneven()])
    with torch.no_grad():
        loss = tiny.classify(trained.model, (features, classes))
    assert float(last) == pytest.approx(float(loss))
    assert "on eval_loader" in repr(trained)


def test_functions_are_named_by_themselves() -> None:
    trained = fitted(steps=1, eval_loader=uneven(), metrics=(accuracy,))
    assert list(trained.evaluations[0].metrics) == ["accuracy"]


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "in a file"])
@pytest.mark.parametrize("by", [True, "height"])
def test_the_model_ends_with_its_best_weights(tmp_path: Path, saved: bool, by: Any) -> None:
    """The second evaluation is the best; later steps change weights, and are taken back."""
    seen: list[dict[str, torch.Tensor]] = []

    def height(model: nn.Module, loader: Any) -> float:
        seen.append(weights(model))
        return [1.0, 3.0, 2.0, 0.0][len(seen) - 1]

    held_out = uneven()

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        """Of held-out data, as high as the metric is low."""
        mean = tiny.classify(model, batch)
        return mean if model.training else mean * 0 + 10.0 - [1.0, 3.0, 2.0, 0.0][len(seen)]

    trained = fitted(
        steps=4,
        loss=loss if by is True else tiny.classify,
        eval_loader=held_out,
        eval_every=1,
        metrics=(height,),
        keep_best=by,
        output_dir=tmp_path / "out" if saved else None,
    )
    assert_same(weights(trained.model), seen[1])
    assert len(trained.history) == 4
    assert not torch.equal(seen[1]["head.weight"], seen[3]["head.weight"])


def test_a_callback_sees_what_was_evaluated_before() -> None:
    told: list[list[int]] = []

    def follow(report: StepReport) -> object:
        told.append([evaluation.step for evaluation in report.evaluations])
        return autofit.STOP if len(report.evaluations) == 2 else None

    trained = fitted(steps=9, eval_loader=uneven(), eval_every=2, callbacks=(follow,))
    assert told == [[], [], [2], [2], [2, 4]]
    assert [evaluation.step for evaluation in trained.evaluations] == [2, 4, 5]


def test_one_call_serves_every_start(tmp_path: Path) -> None:
    how: dict[str, Any] = {"output_dir": tmp_path / "out", "resume": "auto"}
    first = fitted(steps=2, **how)
    again = fitted(steps=4, **how)
    assert [report.step for report in again.history] == [1, 2, 3, 4]
    assert again.history[:2] == first.history
    with pytest.raises(InputError, match="already holds a training run"):
        fitted(steps=4, output_dir=tmp_path / "out")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"eval_every": 3}, "need data to evaluate on"),
        ({"keep_best": True}, "need data to evaluate on"),
        ({"eval_loader": [], "eval_every": 0}, "eval_every must be a positive number"),
        ({"eval_loader": [], "metrics": [3]}, "metrics must be functions"),
        ({"eval_loader": [], "metrics": {"loss": accuracy}}, "cannot be called"),
        ({"eval_loader": [], "keep_best": "acuracy"}, "the name of a metric"),
        ({"resume": "always"}, "resume must be True, False or"),
    ],
)
def test_what_cannot_be_evaluated_is_said_at_once(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        fitted(**given)


def test_a_metric_that_fails_is_named_before_training() -> None:
    def broken(outputs: torch.Tensor, batch: Batch) -> float:
        return outputs.nonsense

    with pytest.raises(InputError, match="the metric broken raised AttributeError"):
        fitted(eval_loader=uneven(), metrics=(broken,), callbacks=(lambda _: 1 / 0,))
