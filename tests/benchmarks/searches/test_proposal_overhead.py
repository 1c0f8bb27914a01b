import json

import pytest

from benchmarks import proposal_overhead


def test_a_small_space_is_searched_and_every_proposal_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--model",
        "tiny-llama",
        "--gpu-mem",
        "1",
        "--space",
        "exact",
        "--configs",
        "30",
        "--trials",
        "6",
    ]
    proposal_overhead.main([*arguments, "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert figures["configs"] == 30
    assert 1 <= figures["proposals"] <= 5
    assert 0 < figures["median_seconds"] <= figures["worst_seconds"]
    assert "among 30 configs took" in proposal_overhead.line(figures)
