"""The allocator: what the user has set stays, what a driver cannot do is left out, all else is given back."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from autofit.core.environment import ALLOCATOR, EXPANDABLE, FIXED
from autofit.hardware import segments


@pytest.fixture(autouse=True, params=["read", "remembered"])
def nothing_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch reads the settings, which CPU builds have as well, as of nobody's; and gives them back at the end.

    PyTorch 2.11 does not tell what they are.
    """
    before = segments.settings()
    monkeypatch.delenv(ALLOCATOR, raising=False)
    if request.param == "remembered":
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    for text in (FIXED, ""):
        segments._set(text)
    yield
    segments._set(before)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There seems to be a card; what is done to its memory is noted."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    return done


def inside(device: str | None = None) -> tuple[str, list[str]]:
    notes: list[str] = []
    with segments.as_in_probes(device, notes.append):
        return segments.settings(), notes


def test_a_training_lets_segments_grow_and_gives_the_setting_back(card: list[str]) -> None:
    for _ in range(2):  # what was given back is not taken for the user's choice
        assert inside() == (EXPANDABLE, [])
        assert segments.settings() == ""
    assert not card, "nothing was on the card"


def test_what_is_free_on_a_card_in_use_is_given_up_before(
    card: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert inside("cuda") == (EXPANDABLE, [])
    assert card == ["emptied"]


@pytest.mark.parametrize("own", [FIXED, "max_split_size_mb:128"])
def test_what_the_user_has_set_stays(own: str, card: list[str]) -> None:
    segments.change(own)
    assert inside() == (own, [])
    assert segments.settings() == own
    segments.change("")
    assert segments.settings() == own, "nothing is asked for"


def test_a_cpu_is_left_alone(card: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert inside("cpu") == ("", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert inside() == ("", [])


def test_where_segments_cannot_be_let_grow_that_is_said(
    card: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    settings, (note,) = inside()
    assert settings == ""
    assert (
        "PYTORCH_ALLOC_CONF) in the allocator cudaMallocAsync, so training may need some percent more"
        in note
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    settings, (note,) = inside()
    assert settings == ""
    assert note.startswith(
        "PYTORCH_CUDA_ALLOC_CONF was set after torch was loaded, which reads it before, so"
    )


class Driver:
    """Stands for what the first allocation on a card comes to."""

    def __init__(self, error: Exception, *, only: str) -> None:
        self.error, self.only = error, only
        self.asked: list[str] = []

    def __call__(self) -> None:
        self.asked.append(segments.settings())
        if self.only in segments.settings():
            raise self.error


def opened(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(segments, "_allocate", driver)
    return segments.open_card()


def test_a_driver_that_cannot_grow_segments_is_asked_for_fixed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments.change(f"max_split_size_mb:64,{EXPANDABLE}")
    driver = Driver(RuntimeError("CUDA driver error: unknown error"), only=EXPANDABLE)
    assert opened(driver, monkeypatch) == f"max_split_size_mb:64,{FIXED}"
    assert len(driver.asked) == 2
    assert opened(driver, monkeypatch) == f"max_split_size_mb:64,{FIXED}"
    assert len(driver.asked) == 3, "it is not asked again for what it cannot do"


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (torch.OutOfMemoryError("full"), EXPANDABLE),
        (torch.AcceleratorError("CUDA error: busy"), EXPANDABLE),
        (RuntimeError("no driver"), FIXED),
    ],
)
def test_other_failures_are_not_the_segments_fault(
    error: Exception, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments.change(settings)
    driver = Driver(error, only="")
    with pytest.raises(type(error), match=str(error)):
        opened(driver, monkeypatch)
    assert len(driver.asked) == 1
    assert segments.settings() == settings


@pytest.mark.parametrize(
    ("reserved", "streams"), [(0, 0), (2 << 20, 1)], ids=["nothing", "segments"]
)
def test_a_stream_of_its_own_is_for_a_card_with_segments_not_for_one_that_was_asked_for_its_name(
    reserved: int, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made.append("stream"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    segments.open_card()
    assert len(made) == streams


@pytest.mark.gpu
def test_segments_of_a_card_in_use_grow_from_then_on() -> None:
    def kinds() -> set[bool]:
        return {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}

    before = torch.ones(1 << 20, device="cuda")
    with segments.as_in_probes("cuda", pytest.fail):
        torch.cuda.empty_cache()
        grown = torch.ones(1 << 28, device="cuda", dtype=torch.uint8)
        assert kinds() == {False, True}
        del grown
    assert segments.settings() == ""
    del before


@pytest.mark.gpu
def test_a_card_in_use_is_asked_for_a_new_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    room = torch.ones(1, device="cuda")  # and much room beside it
    asked = []
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: asked.append(len(torch.cuda.memory_snapshot()))
    )
    held = len(torch.cuda.memory_snapshot())
    segments.change(EXPANDABLE)
    assert segments.open_card() == EXPANDABLE
    assert asked == [held + 1]
    del room
