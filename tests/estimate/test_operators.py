from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autofit.estimate import operators
from autofit.estimate.operator_costs import cost_of
from autofit.estimate.operators import Calls
from autofit.estimate.rates import UNKNOWN
from autofit.estimate.scaling import Symbols
from autofit.estimate.space_estimator import SpaceEstimator
from autofit.techniques import canonicalize
from tests.tiny import CPU, llama_workload

# As fast as nothing is, so that every factor is far above 1 and small calls count too.
RATES = replace(UNKNOWN, source="a test", launch_seconds=0.0)
EXP, BERNOULLI, ADD = (
    torch.ops.aten.exp.default,
    torch.ops.aten.bernoulli.p,
    torch.ops.aten.add.Tensor,
)


def _noted(*calls: tuple[object, torch.Size, dict[str, object]]) -> Calls:
    noted = Calls()
    with FakeTensorMode():
        for func, shape, others in calls:
            given = torch.empty(shape)
            result = func(given, *others.values())  # type: ignore[operator]
            cost = cost_of(func, (given,), {}, [given], result)
            assert cost is not None
            noted.note(func, (given, *others.values()), {}, cost)  # type: ignore[arg-type]
    return noted


@pytest.fixture(autouse=True)
def short_calls_count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(operators, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(operators, "_MOST", 1e9)
    yield


def test_operators_that_look_alike_differ_in_what_they_really_take() -> None:
    shape = torch.Size((512, 512))
    factors = _noted((ADD, shape, {"other": 1.0}), (BERNOULLI, shape, {"p": 0.5})).measured(RATES)
    # A random number takes ten times as long as a sum, in whatever company.
    assert factors["aten::bernoulli float32"][1] > 2 * factors["aten::add float32"][1]


def test_every_size_is_called_but_none_that_needs_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.Size] = []
    monkeypatch.setattr(operators, "_seconds", lambda call: seen.append(call.args[0].shape) or 1.0)
    small, large, huge = torch.Size((8,)), torch.Size((1024, 1024)), torch.Size((4096, 4096))
    found = _noted((EXP, small, {}), (EXP, small, {}), (EXP, large, {}), (EXP, huge, {})).measured(
        RATES
    )
    assert seen[:2] == [large, small]
    assert set(seen) == {large, small}
    # of what moves most
    assert found["aten::exp float32"] == found["aten::exp float32 4194304+4194304"]
    assert _noted((EXP, huge, {})).measured(RATES) == {}


def test_a_call_that_made_up_values_forbid_has_no_factor() -> None:
    noted, cost = Calls(), cost_of(EXP, (torch.ones(4),), {}, [torch.ones(4)], torch.ones(4))
    assert cost is not None

    def choosy(given: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("values must rise")

    noted.note(choosy, (torch.ones(4),), {}, cost)
    assert noted.measured(RATES) == {}


def test_what_does_not_grow_with_the_samples_is_told_from_what_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 1 ms, and 1 ns for each of the elements: 13 samples of 1000.
    monkeypatch.setattr(
        operators, "_seconds", lambda call: 1e-3 + 1e-9 * call.args[0].shape.numel()
    )
    noted, given = Calls(Symbols(13, 11, 17)), torch.empty(13, 1000)
    cost = cost_of(EXP, (given,), {}, [given], given)
    assert cost is not None
    noted.note(EXP, (given,), {}, cost)
    fixed, factor = noted.measured(RATES)["aten::exp float32"]
    assert fixed == pytest.approx(1e-3)
    assert factor * 8 / RATES.bandwidth == pytest.approx(1e-9)  # an element is read and written


@pytest.mark.parametrize(
    ("paces", "passes"), [([1.0] * 4, 2), ([9.0, 9.0, 9.0, 9.0, 1.0, 1.0], 3), ([9.0] * 8, 4)]
)
def test_the_shortest_of_passes_counts_and_they_go_on_until_the_machine_is_undisturbed(
    monkeypatch: pytest.MonkeyPatch, paces: list[float], passes: int
) -> None:
    told, times = iter(paces), iter(range(10, 0, -1))  # each pass is faster
    monkeypatch.setattr(operators, "_pace", lambda rates: next(told))
    monkeypatch.setattr(operators, "_seconds", lambda call: next(times) * 1e-3)
    (fixed, factor), *_ = _noted((EXP, torch.Size((64, 64)), {})).measured(RATES).values()
    assert fixed == 0.0
    expected = operators.working_seconds(_noted_cost(), operators._roofline(RATES))
    assert factor == pytest.approx((11 - passes) * 1e-3 / expected)


def _noted_cost() -> operators.Cost:
    (call,) = _noted((EXP, torch.Size((64, 64)), {}))._calls.values()
    return call.cost


def test_expanded_tensors_are_made_too() -> None:
    like = operators._Like(torch.Size((5, 3)), torch.empty(3).expand(5, 3).stride(), torch.float32)
    assert like.tensor().stride() == (0, 1)
    assert like.tensor().shape == (5, 3)


def test_what_matters_most_is_measured_first_and_time_is_short() -> None:
    shape = torch.Size((64, 64))
    noted = _noted((EXP, shape, {}), (ADD, shape, {"other": 1.0}), (ADD, shape, {"other": 2.0}))
    assert list(noted.measured(RATES, 0.0)) == [
        "aten::add float32 16384+16384",
        "aten::add float32",
        "aten::add",
    ]


def test_the_largest_call_of_every_operator_is_measured_before_any_other() -> None:
    large, larger, small = torch.Size((64, 64)), torch.Size((128, 64)), torch.Size((32, 32))
    noted = _noted((ADD, large, {"other": 1.0}), (ADD, larger, {"other": 1.0}), (EXP, small, {}))
    told = [key for key in noted.measured(RATES, 60.0) if "+" in key]
    assert told == [
        "aten::add float32 32768+32768",
        "aten::exp float32 4096+4096",
        "aten::add float32 16384+16384",
    ]


def test_a_space_is_ranked_by_what_operators_take_here_and_says_so() -> None:
    workload = llama_workload(8, 64)
    here = replace(UNKNOWN, source="measured on this machine")
    configs = [canonicalize({"micro_batch_size": size}, workload, CPU) for size in (1, 8)]
    estimator = SpaceEstimator(workload, CPU, here, configs)
    estimator.predict()
    assert estimator.rates.operators
    known = SpaceEstimator(workload, CPU, estimator.rates, configs)  # as a table kept them
    known.predict()
    assert known.rates.operators == estimator.rates.operators
    elsewhere = SpaceEstimator(workload, CPU, UNKNOWN, configs)
    elsewhere.predict()
    assert elsewhere.rates.operators is None
