"""Errors: exit codes, pickling, and the words of their messages."""

import pickle

import pytest

from autofit.core.errors import (
    AutofitError,
    DivergedError,
    InputError,
    NothingFitsError,
    OutOfMemoryError,
    ProbeError,
    RefusedError,
    UntraceableError,
    counted,
    unknown,
)


def test_exit_codes() -> None:
    codes = {kind: kind.exit_code for kind in (InputError, RefusedError, NothingFitsError, ProbeError)}
    assert codes == {InputError: 2, RefusedError: 2, NothingFitsError: 3, ProbeError: 4}
    assert all(issubclass(kind, AutofitError) for kind in codes)
    assert issubclass(RefusedError, InputError)


def test_message_and_remedy() -> None:
    error = InputError("the cup is empty.", "Fill it.")
    assert (str(error), error.message, error.remedy) == ("the cup is empty. Fill it.", "the cup is empty.", "Fill it.")
    assert str(InputError("the cup is empty.")) == "the cup is empty."


@pytest.mark.parametrize("kind", [InputError, RefusedError, NothingFitsError, ProbeError])
def test_a_journey_from_a_probe_process_keeps_both(kind: type[AutofitError]) -> None:
    back = pickle.loads(pickle.dumps(kind("no.", "Do this.")))
    assert (type(back), back.message, back.remedy) == (kind, "no.", "Do this.")


@pytest.mark.parametrize(
    "error", [UntraceableError("no."), DivergedError(2.0, 3), OutOfMemoryError("no.", "Do this.", torn=True)]
)
def test_so_do_those_that_are_made_of_something_else(error: AutofitError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_unknown_names_the_nearest() -> None:
    assert str(unknown("knob", "precisoin", ["precision", "optimizer"])) == (
        "unknown knob 'precisoin'. Did you mean 'precision'?"
    )


def test_or_all_when_none_is_near() -> None:
    assert str(unknown("knob", "zzz", ["b", "a"])) == "unknown knob 'zzz'. Known: a, b."
    assert str(unknown("rank", 7, [8])) == "unknown rank '7'. Known: 8."


@pytest.mark.parametrize(("number", "text"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1024, "1,024 probes")])
def test_numbers_and_nouns(number: int, text: str) -> None:
    assert counted(number, "probe") == text
