"""The card and the budget of a search, and what it takes from earlier ones. Probes are a formula here."""

import dataclasses
import json
import sqlite3
from typing import Any

import pytest

from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Note
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement
from autofit.core.result import Result
from autofit.hardware.catalogue import card
from autofit.search.beside_tensors import beside_tensors
from autofit.search.space import Space
from autofit.search.study import Limits
from autofit.tuning import measured as tune
from autofit.tuning.measurement_store import Store
from autofit.tuning.narrowing import Narrowing
from tests.tuning.searching import CARD, TRAITS, Bench, fits, notes_of

# The budget and the card


def test_a_card_by_name(bench: Bench) -> None:
    bench.executor.hardware = CARD
    result = bench.search(gpu="rtx-4090", mem=None)
    assert (
        result.hardware.memory_bytes == result.budget.device_bytes == card("rtx-4090").memory_bytes
    )
    assert result.hardware.capability == (8, 9)
    assert "4090" in result.hardware.name
    assert result.hardware.measured_on == "NVIDIA H200"
    assert "measured_on: NVIDIA H200" in (bench.folder / "run" / "result.yaml").read_text()


def test_a_card_larger_than_the_one_here(bench: Bench) -> None:
    bench.executor.hardware = dataclasses.replace(CARD, name="small", memory_bytes=20 * GIB)
    with pytest.raises(
        InputError, match=r"has more memory than the card here: small has 20\.0 GiB"
    ):
        bench.search(gpu="rtx-4090", mem=None)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("rtx-4091", r"unknown GPU 'rtx-4091'\. Did you mean 'rtx-409"),
        ("mi300x", r"AMD Instinct MI300X is not supported: autofit runs on cards that take CUDA\."),
    ],
)
def test_a_card_that_cannot_be_is_told_before_the_device_is_asked(
    bench: Bench, gpu: str, words: str
) -> None:
    bench.executor.inspect = None  # type: ignore[assignment,method-assign]
    with pytest.raises(InputError, match=words):
        bench.search(gpu=gpu, mem=None)


def test_the_card_that_is_here_has_what_its_driver_says(bench: Bench) -> None:
    bench.executor.hardware = dataclasses.replace(
        CARD, name="NVIDIA H100 80GB HBM3", memory_bytes=79 * GIB
    )
    result = bench.search(gpu="h100", mem=None)
    assert result.hardware == bench.executor.hardware
    assert result.budget.device_bytes == 79 * GIB
    assert not result.notes


def test_what_becomes_of_a_budget_is_said_at_once_and_in_the_result(bench: Bench) -> None:
    bench.executor.hardware = dataclasses.replace(CARD, used_bytes=4 * GIB)
    said: list[Any] = []
    result = bench.search(gpu_mem=141, mem=None, listener=said.append)
    assert result.budget.device_bytes == 136 * GIB
    assert result.notes[:2] == (
        "--gpu-mem 141 means the card: NVIDIA H200 has 140.0 GiB.",
        "4.0 of the card's 140.0 GiB are in use: the budget is what is free, 136.00 GiB.",
    )
    assert [event.text for event in said if isinstance(event, Note)][:2] == list(result.notes[:2])


# The store


@pytest.fixture
def stored(bench: Bench) -> Bench:
    """A bench whose searches keep what they measure."""
    bench.executor.traits = dataclasses.replace(TRAITS, fingerprint="f00")
    return bench


def again(bench: Bench, name: str, **options: Any) -> Result:
    bench.executor.asked.clear()
    return bench.search(store=True, out=bench.folder / name, **options)


def stored_sizes() -> list[Any]:
    """The micro-batches of all stored measurements."""
    with sqlite3.connect(Store().path) as file:
        rows = file.execute("SELECT config FROM measurements ORDER BY id").fetchall()
    file.close()
    return [json.loads(config)["micro_batch_size"] for (config,) in rows]


def test_a_second_search_begins_with_the_best_of_the_first_and_reports_nothing_else_of_it(
    stored: Bench,
) -> None:
    first = again(stored, "first", trials=2)
    assert stored.executor.explored == [1, 8]
    assert stored_sizes() == [1, 8, 8, 1, 8]  # explored, then verified
    second = again(stored, "second", trials=1)
    assert stored.executor.explored == [8]
    assert [trial.config["micro_batch_size"] for trial in second.trials] == [8]
    assert second.best
    assert first.best
    assert second.best.config == first.best.config
    assert second.runner_up is None


def test_without_the_store_nothing_is_known_and_nothing_kept(stored: Bench) -> None:
    again(stored, "first", trials=3)
    before = stored_sizes()
    stored.search(trials=1, out=stored.folder / "second")
    assert stored.executor.explored[-1] == 1
    assert stored_sizes() == before


def test_an_interrupt_and_an_error_lose_nothing_of_what_was_measured(stored: Bench) -> None:
    stored.executor.interrupt_at = 2
    assert again(stored, "first").stopped_by == "interrupt"
    assert stored_sizes() == [1, 8]

    def answer(config: Config, _: bool) -> Measurement:
        if len(stored.executor.asked) == 2:
            raise ProbeError("the zygote is gone.")
        return fits(config, 1.0)

    with pytest.raises(ProbeError):
        again(stored, "second", answer=answer)
    assert len(stored_sizes()) == 3


def test_a_search_that_is_resumed_knows_what_others_measured_and_its_own_from_its_journal(
    stored: Bench,
) -> None:
    said: list[Event] = []
    again(stored, "run", trials=2, listener=said.append)
    again(stored, "run", trials=4, resume=True, listener=said.append)
    assert not any("earlier searches" in event.text for event in said if isinstance(event, Note))
    assert set(stored_sizes()) == {1, 2, 4, 8}
    assert sorted(stored.executor.explored) == [2, 4]  # the rest is in the journal
    again(stored, "other", trials=1, listener=said.append)
    assert (
        Note(
            "earlier searches measured 4 configs: they tell where to start (--no-store leaves them out)"
        )
        in said
    )


def test_another_budget_is_answered_by_the_same_measurements(stored: Bench) -> None:
    again(stored, "large")
    small = again(stored, "small", mem=5 * MIB / GIB)  # the 4 takes 4 MiB
    assert stored.executor.explored[0] == 4
    assert 8 not in stored.executor.explored
    assert small.skipped["dominated"] == 1


def test_a_card_that_stands_for_another_is_found_by_what_it_is(stored: Bench) -> None:
    stored.executor.hardware = CARD
    said: list[Event] = []
    again(stored, "first", mem=None, gpu_mem=24, trials=2)
    again(stored, "second", mem=None, gpu="rtx-4090", trials=1, listener=said.append)
    assert any(
        "earlier searches measured 2 configs" in event.text
        for event in said
        if isinstance(event, Note)
    )


def test_a_space_is_narrowed_to_what_tensors_will_probably_find_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what an allocator reserves and a context grows by, on a card; the budget is of tensors on a CPU."""
    told: list[float | None] = []

    def narrowed(narrowing: Narrowing, space: Space) -> tuple[Space, None]:
        told.append(narrowing.cap_bytes)
        return space, None

    def limits(trials: int, seconds: float | None, *memory: Any, **others: Any) -> Limits:
        told.extend(memory)
        return Limits(trials, seconds, *memory, **others)

    monkeypatch.setattr(Narrowing, "narrowed", narrowed)
    monkeypatch.setattr(tune, "Limits", limits)
    budget = bench.search().budget.device_bytes
    assert told == [budget, budget, None]
    told.clear()
    bench.executor.hardware = CARD
    usable = bench.search(gpu="rtx-4090", mem=None, out=bench.folder / "another").budget.cap_bytes(
        "cuda"
    )
    likely = beside_tensors((), CARD.context_bytes).left(usable)
    assert told == [likely, usable - CARD.context_bytes, CARD.context_bytes]
    assert likely < usable / 1.05


def test_a_model_that_cannot_be_told_from_others_is_told_of(bench: Bench) -> None:
    said: list[Event] = []
    again(bench, "first", trials=1, listener=said.append)
    (note,) = notes_of(said)
    assert note.startswith("this model's code has no stable fingerprint")
    assert not Store().path.exists()
