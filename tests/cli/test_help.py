"""`--help` and `-h`: groups of options, an example, and the knobs of --set."""

import re

import pytest

from autofit.cli import main
from autofit.core.knobs import SETTABLE

COMMANDS = ("search", "estimate", "train", "export", "report", "doctor", "models", "spaces")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example_of_itself(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, command, "-h")
    assert shown(capsys, command, "--help") == text
    assert re.search(rf"^ Examples?: *\n autofit {command}\b", text, re.MULTILINE)
    assert "<bool>" not in text
    assert ("Knobs of --set" in text) == (command in ("search", "estimate"))


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "-h")
    assert all(f"│ {command} " in text for command in COMMANDS)
    assert "--install-completion" in text


def test_options_stand_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "search", "--help")
    assert re.findall(r"╭─ (.*?) ─", text) == [
        "Options",
        "Model",
        "Budget",
        "Search space",
        "Search",
        "Output",
    ]
    assert text.split("─ Options ─")[1].split("╰")[0].count("--") == 1, (
        "only --help stands in no group"
    )


def test_the_knobs_of_set_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "search", "--help").partition("Knobs of --set")[2].split())
    assert all(f"{each.name} {each.description}" in text for each in SETTABLE.values())
