"""What a shell offers after Tab is what the rooms behind it know, and nothing heavy is loaded for it."""

import os
import subprocess
import sys

import pytest

from autofit.cli import completion
from autofit.export.tools import tool_named
from autofit.hardware.catalogue import card
from autofit.models import model_names
from autofit.report.run_report import FORMATS
from autofit.search.space import list_spaces


def test_the_names_offered_are_known() -> None:
    assert all(name in model_names() for name, _ in completion.models())
    assert completion.cards_and_list()[0] == "list"
    assert all(card(name) for name in completion.cards_and_list()[1:])
    (first, _), *tools = completion.tools()
    assert first == "list"
    assert all(tool_named(name) for name, _ in tools)
    assert [name for name, _ in completion.spaces()] == [each.name for each in list_spaces()]
    assert tuple(completion.formats()) == FORMATS


def test_knobs_then_their_values() -> None:
    assert "precision=" in completion.settings("")
    assert completion.settings("optimizer_in_backward=") == [
        "optimizer_in_backward=false",
        "optimizer_in_backward=true",
    ]
    assert completion.settings("lora_rank=") == completion.settings("precison=") == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("autofit search --model tiny-l", ["tiny-llama"]),
        ("autofit search --set preci", ["precision="]),
        ("autofit export --to axo", ["axolotl"]),
        ("autofit train --schedule lin", ["linear"]),
        ("autofit doctor --device cu", ["cuda"]),
    ],
)
def test_the_shell_is_answered_without_torch(typed: str, offered: list[str]) -> None:
    code = (
        "import sys\n"
        "from autofit.cli import main\n"
        "try:\n"
        "    main([])\n"
        "except SystemExit:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    asked = {
        "_AUTOFIT_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **asked},
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.split() == offered
