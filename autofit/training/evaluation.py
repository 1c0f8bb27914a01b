"""The mean loss on held-out data, in slices that cannot exhaust memory."""

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from autofit.core.errors import InputError
from autofit.data.batch import map_tensors, sample_count, samples_of
from autofit.data.counts import is_sum, loss_count
from autofit.hardware.out_of_memory import is_out_of_memory
from autofit.setup import Setup
from autofit.setup.state import evaluation_mode
from autofit.training.inspect import blamed_on
from autofit.training.local_batch import local_batch
from autofit.training.replay import has_representations
from autofit.training.step import loss_value
from autofit.training.strategies import strategy_of
from autofit.training.workload import batches_of, put_back

# What a metric gives of the outputs of a forward and its batch, or of the model and the loader.
Metric = Callable[[Any, Any], Any]


class Evaluation(float):
    """The mean loss on held-out data, a float, and what metrics say.

    Attributes:
        step: the number of steps that were done before it.
        metrics: the value of each by its name.
    """

    step: int
    metrics: Mapping[str, float]

    def __new__(cls, loss: float, step: int, metrics: Mapping[str, float]) -> Self:
        evaluation = super().__new__(cls, loss)
        evaluation.step = step
        evaluation.metrics = dict(metrics)
        return evaluation

    def __reduce__(self) -> tuple[Any, ...]:
        return Evaluation, (float(self), self.step, self.metrics)


@dataclass(frozen=True)
class EvaluationPlan:
    """What is evaluated, when, and what for.

    Attributes:
        loader: the held-out data.
        every: so many steps, and at the end; None: after each pass over the training data.
        metrics: functions by their names. One whose parameters are called `(model, loader)` is
            called once; any other gets what the model returned for some samples, and those
            samples: the mean of its values is reported, each weighted by the number of samples.
        best_by: what the best weights are kept by: "loss" (the lowest), or the name of a metric
            (the highest); None: the last weights stay.
    """

    loader: Any
    every: int | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    best_by: str | None = None

    def score(self, evaluation: Evaluation) -> float:
        """What is best where it is highest."""
        if self.best_by in (None, "loss"):
            return -evaluation
        return evaluation.metrics[str(self.best_by)]


@torch.no_grad()
def evaluate(setup: Setup, batches: Iterable[Any]) -> float:
    """The mean loss over `batches`. Raises InputError where no batch has a valid label."""
    return _evaluated(setup, batches, _Outputs(setup, {}))


@torch.no_grad()
def evaluation_of(
    setup: Setup, plan: EvaluationPlan, batches: Iterable[Any], step: int
) -> Evaluation:
    """The evaluation after a step; `batches`: those of the plan's loader that this rank reads.

    Raises InputError where no batch has a valid label, or a metric fails.
    """
    with _Outputs(setup, _of_outputs(plan)) as outputs:
        loss = _evaluated(setup, batches, outputs)
    values = outputs.means()

    with evaluation_mode(setup.model):
        for name, metric in plan.metrics.items():
            if name not in values:
                with blamed_on(f"the metric {name}"):
                    values[name] = float(metric(setup.model, plan.loader))
    return Evaluation(loss, step, {name: values[name] for name in plan.metrics})


def _of_outputs(plan: EvaluationPlan) -> dict[str, Metric]:
    """The metrics that are not of the model and the loader, as their parameters are called."""
    found = {}
    for name, metric in plan.metrics.items():
        parameters: list[str] = []
        with contextlib.suppress(ValueError):  # of a builtin
            parameters = list(inspect.signature(metric).parameters)
        if parameters[:2] != ["model", "loader"]:
            found[name] = metric
    return found


def _evaluated(setup: Setup, batches: Iterable[Any], outputs: "_Outputs") -> float:
    total, weight = _sums(setup, batches, outputs)
    if not weight:
        raise InputError(
            "there is nothing to evaluate on: no batch with a valid label.", "Check eval_loader."
        )
    return total / weight


class _Outputs:
    """What the model returns while its loss is computed, and the sums of metrics on it."""

    def __init__(self, setup: Setup, metrics: Mapping[str, Metric]) -> None:
        self._setup = setup
        self._metrics = metrics
        self._sums = dict.fromkeys(metrics, 0.0)
        self._samples = 0
        self._last: Any = None
        self._hook: Any = None

    def check_none(self, why: str) -> None:
        """Raise an InputError where there are metrics of outputs."""
        if self._metrics:
            names = " and ".join(self._metrics)
            message = f"{names} cannot be computed on what the model returns, {why}."
            raise InputError(message, "Give metrics of (model, loader).")

    def __enter__(self) -> Self:
        if self._metrics:
            self._hook = self._setup.model.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook:
            self._hook.remove()

    def _keep(self, model: Any, inputs: Any, outputs: Any) -> None:
        self._last = outputs

    def add(self, piece: Any) -> None:
        """Add the metrics of the samples whose loss was computed last."""
        if not self._metrics:
            return
        outputs, self._last = self._last, None
        if outputs is None:
            raise InputError(
                f"the loss does not call the model, so {next(iter(self._metrics))} has no outputs.",
                "Write the metric as a function of (model, loader).",
            )

        device = self._setup.device
        piece = map_tensors(piece, lambda tensor: tensor.to(device))
        samples = sample_count(piece, self._setup.workload.split)
        for name, metric in self._metrics.items():
            with blamed_on(f"the metric {name}"):
                self._sums[name] += samples * float(metric(outputs, piece))
        self._samples += samples

    def means(self) -> dict[str, float]:
        """The mean of each metric over the samples of all ranks, which call this together."""
        if not self._metrics:
            return {}
        *sums, samples = self._setup.ranks.sums(*self._sums.values(), float(self._samples))
        return {name: total / samples for name, total in zip(self._sums, sums, strict=True)}


@torch.no_grad()
def check_evaluation(setup: Setup, plan: EvaluationPlan) -> None:
    """Try the loss and the metrics on one sample of the held-out data, before training starts."""
    with put_back(plan.loader):
        first = next(batches_of(plan.loader, name="eval_loader"), None)
    if first is None:
        raise InputError(
            "eval_loader is empty: it gave no batch.", "Check the data set, or leave it out."
        )

    sample = samples_of(first, 0, 1, setup.workload.split)
    with blamed_on("the loss on eval_loader's first sample"):
        # before its terms are counted, which says less of a wrong batch
        if not setup.ranks.are_several:
            with evaluation_mode(setup.model):
                loss_value(setup, sample)

        with _Outputs(setup, _of_outputs(plan)) as outputs:
            _sums(setup, [sample], outputs)


def _sums(setup: Setup, batches: Iterable[Any], outputs: _Outputs) -> tuple[float, float]:
    """The sum of losses and the number of terms in it, of all ranks.

    Slices are as large as the micro-batch, which fits with gradients; where longer samples run out
    of memory, they are halved, on one device.
    """
    workload = setup.workload
    ranks = setup.ranks
    total = weight = 0.0
    size = setup.micro_batch_size
    if setup.part is not None:
        outputs.check_none("of which the last stage of a pipeline alone has something")

    with evaluation_mode(setup.model):
        for batch in batches:
            part = local_batch(setup, batch)
            samples = 0
            if part.counts:
                samples = sample_count(part.batch, workload.split)

            if has_representations(workload.loss):
                outputs.check_none("whose loss is of all samples of a batch at once")
                total += samples * float(strategy_of(setup).loss_of(part))
                weight += samples
                continue

            with strategy_of(setup).over_batch(part):
                start = 0
                while ranks.largest(samples - start)[0] > 0:
                    if start < samples:
                        stop = min(start + size, samples)
                        piece = samples_of(part.batch, start, stop, workload.split)
                        count = loss_count(workload, piece)
                    else:  # a forward that only the other ranks need
                        piece = samples_of(part.batch, 0, 1, workload.split)
                        count = 0.0

                    if count or ranks.are_several:
                        loss = _loss_if_it_fits(setup, piece, size)
                        if loss is None:
                            gc.collect()
                            if setup.device.type == "cuda":
                                torch.cuda.empty_cache()
                            size = max(1, size // 2)
                            continue

                        if count:
                            total += loss if is_sum(workload) else loss * count
                            outputs.add(piece)

                    weight += count
                    start += size

    total, everywhere = ranks.sums(total, weight)
    return total, everywhere


def _loss_if_it_fits(setup: Setup, part: Any, size: int) -> float | None:
    """The loss of some samples; None when memory ran out.

    In a function of its own, so that the handler's frames are freed before a retry.
    """
    try:
        return loss_value(setup, part)
    except Exception as error:
        if size == 1 or setup.ranks.are_several or not is_out_of_memory(error):
            raise
        return None
