import itertools

from autofit.estimate.rates import measure, rates_for, rates_of
from autofit.memory.catalogue import card, card_names, hardware_of
from tests.tiny import CPU


def test_a_card_reaches_less_than_its_maker_says() -> None:
    for name in card_names():
        rates = rates_of(card(name))
        assert rates.peak is not None
        assert all(0 < rates.matmul[kind] < peak for kind, peak in rates.peak.items())
        assert rates.link < rates.bandwidth < card(name).bandwidth


def test_what_is_measured_follows_the_clock() -> None:
    ticks = itertools.count()
    rates = measure(seconds=0.0, clock=lambda: next(ticks) * 0.5)  # every task takes half a second
    assert rates.matmul["float32"] == rates.matmul["bfloat16"] == 2 * 1024**3 / 0.5
    assert rates.launch_seconds == 0.005


def test_the_cpu_at_hand_is_measured_once() -> None:
    assert rates_for(CPU) == rates_for(CPU)


def test_an_unknown_card_has_none() -> None:
    from dataclasses import replace

    known = hardware_of(card("h100"))
    assert rates_for(known) is not None
    assert rates_for(replace(known, name="a card of tomorrow")) is None
