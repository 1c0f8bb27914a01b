"""What goes wrong in other people's code, as errors that say what to do."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from autofit.core.errors import as_input_error, sentence


def failing_as(
    problem: str,
    remedy: str = "",
    *,
    reason: Callable[[BaseException], str] = sentence,
) -> AbstractContextManager[None]:
    """Turn whatever is raised inside into an InputError: "PROBLEM: REASON."

    Args:
        reason: says why, given the error.
    """
    return as_input_error(lambda error: f"{problem}: {reason(error)}.", remedy)


def kind_of_error(error: BaseException) -> str:
    """The name of an error's class, where its message says less."""
    return type(error).__name__
