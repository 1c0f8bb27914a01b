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
    as_input_error,
    describe_error,
    pluralize,
    printable,
    sentence,
    unknown,
)


class Wordless(BaseException):
    def __str__(self) -> str:
        raise Wordless

    __repr__ = __str__


def test_exit_codes() -> None:
    codes = {
        kind: kind.exit_code for kind in (InputError, RefusedError, NothingFitsError, ProbeError)
    }
    assert codes == {InputError: 2, RefusedError: 2, NothingFitsError: 3, ProbeError: 4}
    assert all(issubclass(kind, AutofitError) for kind in codes)
    assert issubclass(RefusedError, InputError)


def test_message_and_remedy() -> None:
    error = InputError("the cup is empty.", "Fill it.")
    assert (str(error), error.message, error.remedy) == (
        "the cup is empty. Fill it.",
        "the cup is empty.",
        "Fill it.",
    )
    assert str(InputError("the cup is empty.")) == "the cup is empty."


@pytest.mark.parametrize("kind", [InputError, RefusedError, NothingFitsError, ProbeError])
def test_a_journey_from_a_probe_process_keeps_both(kind: type[AutofitError]) -> None:
    back = pickle.loads(pickle.dumps(kind("no.", "Do this.")))
    assert (type(back), back.message, back.remedy) == (kind, "no.", "Do this.")


@pytest.mark.parametrize(
    "error",
    [
        UntraceableError("no."),
        DivergedError(2.0, 3),
        OutOfMemoryError("no.", "Do this.", torn=True),
    ],
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


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1024, "1,024 probes")]
)
def test_numbers_and_nouns(number: int, text: str) -> None:
    assert pluralize(number, "probe") == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\nlines. "), "ValueError: two lines"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (Wordless(), "Wordless"),
        (ValueError("a\x1b[31m\udc80\0"), "ValueError: a\\x1b[31m\\udc80\\x00"),
        (ValueError("x" * 10**7), f"ValueError: {'x' * 500}..."),
        (type("E" * 10**6, (Exception,), {})(), f"{'E' * 500}..."),
    ],
    ids=["plain", "no message", "exit", "no words", "not printable", "long", "a long name"],
)
def test_somebody_elses_error_is_a_short_line(error: BaseException, text: str) -> None:
    assert describe_error(error) == text
    assert text.endswith(sentence(error))


def test_a_text_keeps_its_lines() -> None:
    assert printable("a\nb\tc") == "a\nb\\tc"
    assert printable("abc", 2) == "ab..."


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit("no"), GeneratorExit("no"), Wordless()]
)
def test_whatever_is_raised_is_reported(error: BaseException) -> None:
    with (
        pytest.raises(InputError) as caught,
        as_input_error(lambda raised: f"it raised {describe_error(raised)}.", "Mend it."),
    ):
        raise error
    assert str(caught.value) == f"it raised {describe_error(error)}. Mend it."
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RefusedError("no."), MemoryError()])
def test_but_for_ctrl_c_and_autofits_own_and_others_as_asked(error: BaseException) -> None:
    with (
        pytest.raises(type(error)),
        as_input_error(describe_error, but=lambda raised: isinstance(raised, MemoryError)),
    ):
        raise error
