"""Every error a user can cause, and the exit code each one means.

A message says what is wrong and what was given; the remedy says what to do.
"""

import contextlib
import difflib
import errno
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

_MOST_SHOWN = 200  # characters of a value
_MOST_NAMED = 40  # of what is known, in a message
_MOST_TOLD = 500  # characters of a message
# What loaders of shared libraries say where they get no memory.
_NO_MEMORY = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory")
MEMORY_FULL = ("this machine's memory is full.", "Free some; what was kept goes on with --resume.")


class AutofitError(Exception):
    """Base of all errors that are reported to the user as one sentence and a remedy."""

    exit_code = 2

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling the constructors of subclasses, which take other arguments."""
        return type(self).__new__, (type(self), *self.args), vars(self)

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class InputError(AutofitError):
    """Something the user gave is wrong."""


class RefusedError(InputError):
    """A technique cannot be applied to this model; raised while building, measured as `refused`."""


class UntraceableError(InputError):
    """The model's code depends on the values of tensors, which a trace lacks."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "Nothing can be predicted of such a model; measuring works.")


class NothingFitsError(AutofitError):
    """No config of the space fits the budget."""

    exit_code = 3


class ProbeError(AutofitError):
    """Probes cannot run: no such device, or the child processes do not start."""

    exit_code = 4


class NoDeviceError(ProbeError):
    """The device asked for is absent."""


class RankError(AutofitError):
    """One of the processes that train together failed, and so all ended.

    `details`: its traceback, or last output, which Python shows below this one's.
    """

    exit_code = 4

    def __init__(self, message: str, remedy: str = "", details: str = "") -> None:
        super().__init__(message, remedy)

        self.details = details
        if details:
            self.add_note(details)


class StoreError(AutofitError):
    """The store of measurements cannot be read or written; a search continues without it."""


class DivergedError(InputError):
    """The loss of a step (from 1) is not finite; the weights are those before the step."""

    def __init__(self, loss: float, step: int, message: str = "") -> None:
        remedy = "Lower the learning rate, or use precision bf16-mixed or fp32."
        if step == 1:
            reason = "with no step taken, the learning rate is not to blame"
            remedy = f"Check the data and the loss: {reason}."
        super().__init__(message or f"the loss is {loss} at step {step}.", remedy)

        self.loss = loss
        self.step = step


class OutOfMemoryError(AutofitError):
    """Training ran out of memory, and no cheaper config is left.

    `torn`: weights or state are half updated; then `knobs` may hold those that need less, to train
    again from the last checkpoint.
    """

    exit_code = 3

    def __init__(self, message: str, remedy: str = "", *, torn: bool = False) -> None:
        super().__init__(message, remedy)
        self.torn = torn
        self.knobs: dict[str, Any] = {}


def unknown(kind: str, given: object, known: Iterable[object]) -> InputError:
    """An InputError for a name that does not exist, with the nearest one that does."""
    text = given if isinstance(given, str) else shown(given)
    names = sorted(map(str, known))
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.5)

    more = len(names) - _MOST_NAMED
    others = f" and {more} others" if more > 0 else ""
    remedy = f"Known: {', '.join(names[:_MOST_NAMED])}{others}."
    if near:
        remedy = f"Did you mean {near[0]!r}?"
    return InputError(f"unknown {kind} {shown(text)}.", remedy)


def shown(value: object) -> str:
    """A value as a sentence shows it: cut where it is long; its type where it cannot be written."""
    try:
        return printable(repr(value), _MOST_SHOWN)
    except Exception:  # of a user's class, or of an integer of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"


def printable(text: str, most: int = _MOST_TOLD) -> str:
    """Somebody else's text for terminals, logs and JSON.

    It is cut where it is long; control characters and lone surrogates are escaped.
    """
    if len(text) > most:
        text = f"{text[:most]}..."

    safe = ""
    for sign in text:
        if sign.isprintable() or sign == "\n":
            safe += sign
        else:
            safe += sign.encode("unicode_escape").decode()
    return safe


def message_of(error: BaseException) -> str:
    """What an error says, at most 100,000 characters; "" where its own class raises instead."""
    try:
        return str(error)[:100_000]
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""


def sentence(error: BaseException) -> str:
    """The message of somebody else's error on one line, without its full stop; else its type."""
    text = message_of(error).partition("Exception raised from")[0]  # PyTorch's C++ stack
    line = " ".join(text.split()).rstrip(".")
    return printable(line or type(error).__name__)


def describe_error(error: BaseException) -> str:
    """An error of somebody else's code as a sentence names it: by its type and its message."""
    kind = printable(type(error).__name__)
    message = sentence(error)
    return kind if message == kind else f"{kind}: {message}"


def lacks_memory(error: BaseException | None) -> bool:
    """Whether the system had no memory left, for data or for a library that was to be imported."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # a chain made by hand may be a circle
        seen.add(id(error))
        is_of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
        text = message_of(error) if isinstance(error, ImportError) else ""
        if isinstance(error, MemoryError) or is_of_system or any(map(text.count, _NO_MEMORY)):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def as_input_error(
    says: Callable[[BaseException], str],
    remedy: str = "",
    *,
    but: Callable[[BaseException], bool] = lambda _: False,
) -> Iterator[None]:
    """Turn whatever somebody else's code raises inside into an InputError.

    Autofit's own errors, Ctrl-C and errors that `but` is true of pass.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, AutofitError | KeyboardInterrupt) or but(error):
            raise
        raise InputError(says(error), remedy) from error


def multiple_losses_error(what: str) -> InputError:
    """The error for several losses or optimizers."""
    return InputError(
        f"{what}: autofit trains one loss with one optimizer.",
        "Add up the losses, and let one optimizer have all weights; of networks that are trained "
        "in turns, as in a GAN, give one, with its loss.",
    )


def require(fine: object, rule: str, given: object, remedy: str = "") -> None:
    """Raise the InputError "RULE, not GIVEN." unless what was given is fine."""
    if not fine:
        raise InputError(f"{rule}, not {shown(given)}.", remedy)


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether a value is a whole number, and at least so large; True and 1.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def pluralize(number: int, noun: str) -> str:
    """A number with its noun, for example "1 probe" and "1,024 configs"; the plural takes an s."""
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"
