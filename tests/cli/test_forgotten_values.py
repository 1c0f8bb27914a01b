"""An option whose value was forgotten does not swallow the next option."""

import json
from pathlib import Path

import pytest

from autofit.cli import main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["search", "--model", "--gpu-mem", "24"], "--model lacks its value: --gpu-mem is"),
        (["train", "x.yaml", "--output", "--quiet"], "--output lacks its value: --quiet is"),
        (["report", "x", "--output", "-h"], "--output lacks its value: -h is"),
    ],
)
def test_the_option_that_lacks_a_value_is_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_error_is_json_where_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["export", "x.yaml", "--to", "trl", "--output", "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"] == "--output lacks its value: --json is an option, too."
    assert not list(tmp_path.iterdir())


def test_a_value_may_be_written_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["export", "x.yaml", "--to=--json"],
        ["export", "--to", "trl", "--", "--to", "-h"],
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert "lacks its value" not in capsys.readouterr().err
