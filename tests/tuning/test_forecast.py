"""What is predicted before the first probe."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autofit import techniques
from autofit.core.events import Event
from autofit.core.options import SearchOptions
from autofit.estimate.figures import predict_all
from autofit.hardware.catalogue import card, hardware_of
from autofit.probe import Executor
from autofit.search.enumeration import Enumeration
from autofit.tuning import forecast
from autofit.tuning.context import Context
from autofit.tuning.forecast import Forecast
from autofit.tuning.narrowing import Values
from autofit.tuning.target import structure_traits
from tests.tiny import llama_workload

KNOBS: Values = {
    "lora_rank": (0,),
    "micro_batch_size": (1, 2, 4),
    "loss": ("chunked", "standard"),
    "optimizer": ("adamw", "adamw-foreach"),
}


class HereExecutor:
    """Runs here what should run in a child process."""

    def run(self, function: Any, *arguments: Any, log: str, timeout: float) -> Any:
        return function(*arguments)


def forecast_of(likely_bytes: float, events: list[Event]) -> Forecast:
    workload = llama_workload(2, 64)
    cards = hardware_of(card("rtx-4090"))
    context = SimpleNamespace(
        workload=dataclasses.replace(workload, traits=structure_traits(workload, cards)),
        hardware=cards,
        budget=SimpleNamespace(host_bytes=math.inf),
        likely_bytes=likely_bytes,
    )
    return Forecast(
        cast(Context, context),
        SearchOptions(),
        cast(Executor, HereExecutor()),
        events.append,
        measured=list,
        seconds_left=lambda: math.inf,
    )


def test_beside_drawn_configs_come_those_around_the_best_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Event] = []
    unlimited = forecast_of(math.inf, events)
    workload, cards = unlimited._context.workload, unlimited._context.hardware
    space = Enumeration(KNOBS, techniques.constraints(workload, cards)).configs()
    _, seconds = predict_all(workload, cards, space)
    by_speed = sorted(space, key=dict(zip(space, seconds, strict=True)).__getitem__)
    drawn = by_speed[-2:]

    listed = unlimited.predictions(drawn, KNOBS)
    assert listed is not None
    assert not listed.between

    monkeypatch.setattr(forecast, "MAX_CONFIGS", len(drawn))
    around = unlimited.predictions(drawn, KNOBS)
    assert around is not None
    assert by_speed[0] in around.between
    assert around.nbytes.keys() == {*drawn, *around.between}
    assert listed.seconds.items() <= around.seconds.items()

    nothing_fits = forecast_of(0.0, events).predictions(drawn, KNOBS)
    assert nothing_fits is not None
    assert not nothing_fits.between
    assert {type(event).__name__ for event in events} == {"PhaseStarted"}
