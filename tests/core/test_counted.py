"""One thing is told in the singular."""

import pytest

from autofit.core.counted import counted


@pytest.mark.parametrize(("number", "told"), [(0, "0 probes"), (1, "1 probe"), (2, "2 probes"), (1024, "1,024 probes")])
def test_numbers_and_nouns(number: int, told: str) -> None:
    assert counted(number, "probe") == told
