"""What is predicted of a space before its first probe: bytes and seconds of each config, and
numbers of blocks that the space does not list."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from autofit.core.config import Config, Value
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Listener, Note, PhaseStarted
from autofit.core.options import SearchOptions
from autofit.estimate.figures import predict_all
from autofit.estimate.operators import MEASURING_SECONDS
from autofit.probe import Executor
from autofit.search.enumeration import MAX_CONFIGS
from autofit.search.predictions import Predictions
from autofit.tuning.context import Context, ranking_for
from autofit.tuning.fractions import may_fit_between, predict_between, values_between
from autofit.tuning.narrowing import BytesAndSeconds, Row, Values
from autofit.tuning.predicted_space import predict_drawn

# For predicting a space, at most, and as a share of a time limit; else it is skipped.
PREDICT_SECONDS = 300.0
PREDICT_SHARE = 0.5
TRACE_SHARE = 0.6  # of that for tracing; the rest is for putting together what could be traced
_FAST_MEASURING = 0.5  # seconds for timing operators before configs are predicted
_WHY_UNKNOWN = "their steps could not be followed, or not in the time for that"


class Forecast:
    """Predicts a space in child processes, on as many cores as probes run on.

    Args:
        context: of the search.
        explorer: runs the children.
        measured: the configs that a resumed search has measured.
        seconds_left: for exploring.
    """

    def __init__(
        self,
        context: Context,
        options: SearchOptions,
        explorer: Executor,
        listener: Listener,
        *,
        measured: Callable[[], list[Config]],
        seconds_left: Callable[[], float],
    ) -> None:
        self._context = context
        self._options = options
        self._explorer = explorer
        self._listener = listener
        self._measured = measured
        self._seconds_left = seconds_left
        self._last: tuple[Sequence[Config], BytesAndSeconds] | None = None

    def figures(self, configs: Sequence[Config]) -> BytesAndSeconds:
        """Bytes and seconds of each config; the answer to the last question is kept.

        Raises:
            ProbeError: no time is left, or they cannot be predicted.
        """
        if self._last:
            known, earlier = self._last
            if known == configs:
                return earlier

        figures: BytesAndSeconds = self._run(predict_all, configs)
        self._last = configs, figures
        return figures

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function that predicts says of the workload in a child process."""
        timeout = self._timeout()
        context = self._context
        predict = functools.partial(
            function,
            measuring=_FAST_MEASURING if self._options.fast else MEASURING_SECONDS,
            within=TRACE_SHARE * timeout,
            processes=None,
            host_bytes=context.budget.host_bytes,
        )
        return self._explorer.run(
            predict,
            context.workload,
            context.hardware,
            *arguments,
            log="estimate.log",
            timeout=timeout,
        )

    def predictions(self, configs: Sequence[Config], knobs: Values) -> Predictions | None:
        """Of all configs of a space; None where none can be predicted, which a search can do
        without.

        Args:
            knobs: the values of the space.
        """
        self._listener(PhaseStarted(f"predicting {len(configs):,} configs before the first probe"))
        around: list[Row] = []
        try:
            if len(configs) < MAX_CONFIGS:
                nbytes, seconds = self.figures(configs)
            else:
                objective = ranking_for(self._options).objective
                likely_bytes = self._context.likely_bytes
                (nbytes, seconds), around = self._run(
                    predict_drawn, configs, knobs, likely_bytes, objective
                )
        except (InputError, ProbeError) as error:
            self._listener(Note(f"prediction skipped: {error.message}"))
            return None

        unknown = sum(map(math.isnan, nbytes))
        if unknown:
            text = f"{unknown:,} of {len(nbytes):,} configs are not predicted: {_WHY_UNKNOWN}."
            self._listener(Note(text))
        if unknown == len(nbytes):
            return None

        rows = list(map(Row, configs, nbytes, seconds))
        between = [*around, *self._between([*rows, *around], knobs)]
        predicted = Predictions.of(*zip(*rows, *between, strict=True))
        return dataclasses.replace(predicted, between=tuple(row.config for row in between))

    def values_between(self, knobs: Values) -> dict[str, tuple[Value, ...]]:
        """By knob the values for some of the model's blocks that configs of a space may have."""
        traits = self._context.workload.traits
        if traits is None or self._options.fast:
            return {}
        return values_between(knobs, traits.blocks)

    def _between(self, rows: Sequence[Row], knobs: Values) -> list[Row]:
        """The configs in which some blocks are treated in one way that may be better than all that
        is known; none where there is no time to look."""
        context = self._context
        values = self.values_between(knobs)
        known = [
            config
            for config in (self._measured() if values else ())
            if any(config[knob] in its for knob, its in values.items())
        ]
        worth = may_fit_between(rows, context.likely_bytes) if values else []
        if not worth and not known:
            return []

        try:
            found: list[Row] = self._run(predict_between, knobs, worth, context.likely_bytes, known)
        except (InputError, ProbeError) as error:
            self._listener(Note(f"numbers of blocks are not looked for: {error.message}"))
            return []
        return found

    def _timeout(self) -> float:
        """Seconds that a prediction may take; raises ProbeError where no time is left for one."""
        limit = PREDICT_SHARE * (self._options.time_limit or math.inf)
        seconds = min(PREDICT_SECONDS, limit, self._seconds_left())
        if seconds <= 0:
            raise ProbeError("no time is left for it.")
        return seconds
