"""A probe on a card, by a stand-in for what torch.cuda says of one: no test here needs it. test_cuda.py has those."""

import ctypes
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofit import techniques
from autofit.core.budget import Budget
from autofit.core.errors import ProbeError
from autofit.core.hardware import GIB, MIB
from autofit.core.measurement import Measurement, Outcome
from autofit.core.workload import Workload
from autofit.hardware import device
from autofit.probe import Plan, on_cuda, steps
from autofit.probe.measure import measure
from tests import tiny

CONTEXT = 512 * MIB
CARD = dataclasses.replace(
    tiny.CPU, device="cuda", name="a card", memory_bytes=80 * GIB, context_bytes=CONTEXT
)
BUDGET = Budget(10 * GIB, 64 * GIB, margin=0.1)  # 9 GiB may be used, 8.5 by tensors
NOTHING = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of ..."
)


def ended(code: int, text: str) -> torch.AcceleratorError:
    """As PyTorch raises what a call of CUDA returns: what happened, and then how to debug PyTorch."""
    error = torch.AcceleratorError(
        f"CUDA error: {text}\nCUDA kernel errors might be reported late.\nCompile with DSA.\n"
    )
    error.error_code = code
    return error


class Card:
    """A card of 80 GiB, PyTorch's allocator on it, and what others and libraries hold of it beside that."""

    def __init__(self) -> None:
        self.others = self.emptied = 0
        self.cap = CARD.memory_bytes
        self.open()

    def open(self) -> None:
        """As a new process finds it."""
        self.beside = self.reserved = self.peak = 0
        self.broken: Exception | None = None

    def take(self, nbytes: int) -> None:
        """A tensor for a moment, of which the allocator keeps the memory."""
        if nbytes > self.reserved:
            if nbytes > self.cap:
                raise NOTHING
            self.reserved = nbytes
        self.peak = max(self.peak, self.reserved)

    def get_info(self, *_: Any) -> tuple[int, int]:
        if self.broken:
            raise self.broken
        return (
            CARD.memory_bytes - CONTEXT - self.others - self.beside - self.reserved,
            CARD.memory_bytes,
        )

    def allow(self, fraction: float, device: int) -> None:
        self.cap = round(fraction * CARD.memory_bytes)

    def empty(self) -> None:
        self.emptied += 1
        self.reserved = 0

    def forget(self, *_: Any) -> None:
        self.peak = self.reserved


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """torch.cuda answers for this one; what is trained lies on the CPU."""
    card = Card()
    answers: dict[str, Callable[..., Any]] = {
        "mem_get_info": card.get_info,
        "memory_reserved": lambda *_: card.reserved,
        "max_memory_reserved": lambda *_: card.peak,
        "max_memory_allocated": lambda *_: card.peak,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": card.forget,
        "empty_cache": card.empty,
        "set_per_process_memory_fraction": card.allow,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=CARD.memory_bytes),
        "synchronize": lambda: None,
        "is_initialized": lambda: True,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(on_cuda, "_compute", card.open)
    build = steps.build
    monkeypatch.setattr(
        steps, "build", lambda workload, config, hardware: build(workload, config, tiny.CPU)
    )
    return card


def doing(action: Callable[[int], object]) -> Workload:
    """Training whose loss does something first, told how often it was called before."""
    plain, calls = tiny.mlp_workload(), [-1]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        action(calls[0])
        return tiny.classify(model, batch)

    return Workload(model=plain.model, batch=plain.batch, loss=loss, effective_batch_size=4)


def request(workload: Workload, budget: Budget = BUDGET, **knobs: Any) -> steps.Request:
    config = techniques.canonicalize(knobs, workload, CARD)
    return steps.Request(config, CARD, budget, Plan(min_steps=2, max_steps=2))


def measured(action: Callable[[int], object], **knobs: Any) -> Measurement:
    workload = doing(action)
    return measure(workload, request(workload, **knobs))


def test_what_fits_tells_the_allocator_and_the_context_apart(card: Card) -> None:
    seen = measured(lambda _: card.take(3 * GIB))
    assert seen.fits, seen.reason
    assert seen.peak_bytes
    assert (seen.peak_bytes.reserved, seen.peak_bytes.device) == (3 * GIB, 3 * GIB + CONTEXT)
    assert card.emptied == 0


def test_the_cap_is_what_the_budget_leaves_beside_the_context(card: Card) -> None:
    assert measured(lambda _: card.take(BUDGET.device_bytes * 85 // 100)).fits
    seen = measured(lambda _: card.take(BUDGET.device_bytes * 86 // 100))
    assert (seen.outcome, seen.reason) == (Outcome.OUT_OF_MEMORY, "needs more than 10.00 GiB")


@pytest.mark.parametrize(
    ("raised", "used", "told"),
    [
        (
            NOTHING,
            79 * GIB,
            "the card is full before autofit has taken any of it: 79.0 GiB are in use.",
        ),
        (ended(2, "out of memory"), 0, "the card is full before autofit has taken any of it."),
        (
            RuntimeError("CUDA driver error: out of memory"),
            0,
            "the card is full before autofit has taken any of it.",
        ),
        (
            ended(46, "devices are busy"),
            0,
            "the card cannot be used: CUDA error: devices are busy.",
        ),
    ],
    ids=["by the allocator", "by the runtime", "by the driver", "busy"],
)
def test_a_card_that_cannot_be_opened_is_no_measurement(
    card: Card, monkeypatch: pytest.MonkeyPatch, raised: Exception, used: int, told: str
) -> None:
    def compute() -> None:
        card.others = CARD.memory_bytes - CONTEXT
        raise raised

    monkeypatch.setattr(on_cuda, "_compute", compute)
    monkeypatch.setattr(device, "used_bytes_without_context", lambda: used)
    with pytest.raises(ProbeError) as caught:
        measured(lambda _: None)
    assert caught.value.message == told


def test_what_runs_out_on_a_card_that_others_use_is_no_measurement(card: Card) -> None:
    """But what fits there, fits."""
    card.others = 73 * GIB
    assert measured(lambda _: card.take(6 * GIB)).fits

    def full(_: int) -> None:
        raise NOTHING

    with pytest.raises(
        ProbeError, match=r"others use the card.* 6\.5 GiB .* are free .* 8\.5\. End the other"
    ):
        measured(full)


def test_nor_is_what_runs_out_once_others_have_come(card: Card) -> None:
    """What they take counts as the context of this process, which lowers its cap: by gigabytes, it is theirs."""

    def comes(call: int) -> None:
        card.others = 3 * GIB
        card.take(6 * GIB)

    with pytest.raises(
        ProbeError,
        match=r"others use the card.* 3\.0 GiB of the card were taken beside its tensors",
    ):
        measured(comes)


def test_communicators_of_several_cards_are_not_others(card: Card) -> None:
    workload = doing(lambda _: None)
    of_one = request(workload)
    alone, among = (
        on_cuda.CudaProbe(workload, dataclasses.replace(of_one, hardware=CARD.of_several(count)))
        for count in (1, 2)
    )
    card.beside = 3 * GIB
    among.check_free_memory()
    with pytest.raises(ProbeError, match="others use the card"):
        alone.check_free_memory()


def test_after_an_assert_in_a_kernel_nothing_is_asked_of_the_device(card: Card) -> None:
    def ends(call: int) -> None:
        card.take(GIB)
        if call == 1:
            card.broken = ended(710, "device-side assert triggered")
            raise card.broken

    seen = measured(ends)
    assert seen.outcome is Outcome.FAILED
    assert (
        (seen.reason or "")
        .splitlines()[-1]
        .endswith("AcceleratorError: CUDA error: device-side assert triggered")
    )
    assert seen.peak_bytes
    assert seen.peak_bytes.device == GIB + CONTEXT


@pytest.mark.parametrize(
    "later",
    [ended(710, "of a later call"), RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED")],
)
def test_the_error_that_ended_the_device_is_told_and_not_those_that_followed(
    card: Card, later: Exception
) -> None:
    def ends(_: int) -> None:
        try:
            raise ended(700, "an illegal memory access was encountered")
        finally:
            raise later

    seen = measured(ends)
    assert seen.outcome is Outcome.FAILED
    assert (seen.reason or "").endswith("CUDA error: an illegal memory access was encountered")


def test_what_libraries_take_comes_off_the_cap_before_steps_are_timed(card: Card) -> None:
    def grows(call: int) -> None:
        card.beside = 300 * MIB
        card.take(8 * GIB)

    seen = measured(grows)
    assert seen.fits
    assert card.emptied == 0  # that is less than the new cap
    assert card.cap == 9 * GIB - CONTEXT - 300 * MIB
    assert seen.peak_bytes
    assert seen.peak_bytes.device == 8 * GIB + CONTEXT + 300 * MIB


def test_what_was_reserved_before_the_cap_was_lowered_is_given_up(card: Card) -> None:
    def hoards(call: int) -> None:
        card.beside = GIB
        card.take(8 * GIB if call == 0 else 7 * GIB)

    seen = measured(hoards)
    assert seen.fits, seen.reason
    assert card.emptied == 1
    assert seen.peak_bytes
    assert seen.peak_bytes.device == 7 * GIB + CONTEXT + GIB

    def needs(_: int) -> None:
        card.beside = GIB
        card.take(8 * GIB)

    assert measured(needs).outcome is Outcome.OUT_OF_MEMORY


@pytest.mark.parametrize("built", [2, 5])
def test_buffers_of_the_compiler_are_no_part_of_the_peak_but_the_build_is(
    card: Card, monkeypatch: pytest.MonkeyPatch, built: int
) -> None:
    build = steps.build

    def taking(*arguments: Any) -> Any:
        card.take(built * GIB)
        return build(*arguments)

    monkeypatch.setattr(steps, "build", taking)
    workload = doing(lambda call: card.take((7 if call == 0 else 3) * GIB))
    probe = on_cuda.CudaProbe(workload, request(workload))
    probe.compiles = True
    probe.run()
    assert probe.verdict() == (Outcome.FITS, None)
    assert probe.peak().reserved == max(built, 3) * GIB


def test_a_card_is_made_as_small_as_the_budget_where_state_moves_to_the_host(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(on_cuda, "_hold", held.append)
    assert techniques.technique_named("optimizer").pages("paged-adamw-8bit")
    for pages, budget in ((False, BUDGET), (True, BUDGET), (True, Budget(CARD.memory_bytes, GIB))):
        workload = doing(lambda _: card.take(GIB))
        probe = on_cuda.CudaProbe(workload, request(workload, budget))
        probe.pages = pages
        probe.prepare()
    assert held == [70 * GIB]


def test_pages_beside_the_allocator_are_not_held_against_the_budget(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_cuda, "_hold", lambda _: None)

    def fills(_: int) -> None:
        card.beside = 70 * GIB  # what is held of the card, and pages in all the rest
        card.take(8 * GIB)

    workload = doing(fills)
    probe = on_cuda.CudaProbe(workload, request(workload))
    probe.pages = True
    probe.run()
    assert probe.verdict()[0] is Outcome.FITS
    assert probe.peak().device == 8 * GIB + CONTEXT


@pytest.mark.parametrize("answer", [0, 2, None])
def test_plain_memory_is_taken_by_the_runtime_and_its_refusal_told(
    monkeypatch: pytest.MonkeyPatch, answer: int | None
) -> None:
    asked: list[int] = []

    def allocate(address: Any, size: ctypes.c_size_t) -> int:
        asked.append(size.value)
        return answer or 0

    runtime = SimpleNamespace() if answer is None else SimpleNamespace(cudaMalloc=allocate)
    monkeypatch.setattr(on_cuda.ctypes, "CDLL", lambda name: runtime)
    if answer == 0:
        on_cuda._hold(70 * GIB)
    else:
        with pytest.raises(ProbeError, match=r"70\.0 GiB of the card, the part above the budget"):
            on_cuda._hold(70 * GIB)
    assert asked == ([] if answer is None else [70 * GIB])
