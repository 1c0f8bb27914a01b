"""Work in other processes: in order, no further ahead than needed, and nothing is left when it ends."""

import os
from collections.abc import Iterator

import psutil
import pytest

from autofit.core.errors import ProbeError
from autofit.data.workers import mapped


def workers() -> set[int]:
    """The processes of this one; probes of other tests may have one, too."""
    return {process.pid for process in psutil.Process().children()}


def test_answers_come_in_order_and_errors_as_they_are() -> None:
    before = workers()
    found: list[int] = []
    with pytest.raises(ValueError, match="invalid literal"):
        found.extend(mapped(int, ["1", "2", "3", "x", "5"], in_processes=True))
    assert found == [1, 2, 3]
    assert workers() == before


def test_what_is_not_asked_for_is_not_read_and_processes_end_with_the_asker() -> None:
    before = workers()
    read = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            read.append(number)
            yield number

    answers = mapped(abs, numbers(), in_processes=True)
    assert next(answers) == 0
    assert len(read) < 100
    assert workers() > before
    answers.close()
    assert workers() == before


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(ProbeError, match="a process that tokenises the data ended with 3: "):
        list(mapped(os._exit, [3], in_processes=True))
