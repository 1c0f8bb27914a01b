"""When a command began, from which its time limit counts."""

import time

from autofit.core.beginning import began, counted_from_now


def test_it_is_when_the_command_began_and_now_where_none_runs() -> None:
    before = time.monotonic()
    assert before <= began() <= time.monotonic()
    with counted_from_now():
        first = began()
        time.sleep(0.01)
        assert began() == first
    assert began() > first
