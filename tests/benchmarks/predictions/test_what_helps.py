import json
from pathlib import Path

import pytest

from autofit.tuning import remedies
from benchmarks import what_helps


@pytest.mark.slow  # its quick twin is in tests/tuning/test_remedies.py
def test_what_is_named_for_a_small_model_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # several cards take as long to follow as all the rest
    monkeypatch.setattr(remedies, "_DEVICES", ())
    out = tmp_path / "cases.jsonl"
    what_helps.main(["--smoke", "--out", str(out)])
    said = capsys.readouterr().out
    assert "1 of 1 cases: all that is named fits" in said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({each["kind"] for row in rows for each in row["remedies"]}) >= 3
    what_helps.main(["--smoke", "--out", str(out)])  # nothing is done again
    assert capsys.readouterr().out == said


def test_a_case_is_right_only_if_all_that_is_named_fits() -> None:
    def row(*verdicts: str) -> dict[str, object]:
        return {"remedies": [{"kind": "time", "verdict": verdict} for verdict in verdicts]}

    said = what_helps.report([row("yes", "yes"), row("yes", "maybe"), row()])
    assert said.startswith("2 of 3 cases")
    assert "time     3 yes, 1 maybe" in said
    assert said.endswith("1 cases without a remedy")
