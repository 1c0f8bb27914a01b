"""The seconds of a search are told by phase, from the lines that it prints."""

import pytest

from benchmarks.answer_time import README, demo, phases, report

LINES = [
    (4.0, "predicting 14,688 configs before the first probe\n"),
    (7.0, "probe 1 of 2: fits, 5,461 tokens/s\n"),
    (9.0, "probe 2 of 2: fits, 4,736 tokens/s\n"),
    (12.0, "verifying probe 2: fits, 4,701 tokens/s\n"),
    (15.0, "verifying probe 1: fits, 5,367 tokens/s\n"),
    (18.0, "verifying probe 2: fits, 4,720 tokens/s\n"),
    (21.0, "verifying probe 1: fits, 5,390 tokens/s\n"),
    (22.0, "Written to autofit-runs/tiny-llama:\n"),
]


def test_phases_end_with_the_lines_that_tell_of_them() -> None:
    found = phases(LINES)
    ends = {"first probe": 7.0, "last probe": 9.0, "first verified": 18.0, "last final": 21.0}
    assert found == {**ends, "probes": 2, "finals": 4}
    told = report({**found, "end": 23.5}).splitlines()
    assert told[2] == "first verified  after   18.0 s,   9.0 s of them"
    assert told[-1] == "2 probes, 4 finals"


def test_it_searches_what_the_readme_shows() -> None:
    assert {"--device", "--mem", "--trials"} <= set(demo(README.read_text(encoding="utf-8")))
    with pytest.raises(AssertionError, match="the README has a demo"):
        demo("nothing to see")
