"""`autofit search --for TOOL`: an answer that the tool runs exactly, so that its export has no
deviations."""

from pathlib import Path

import pytest

from tests.cli.command import LLAMA, Run
from tests.following import unfollowed

NARROW = ("--trials", "2", "--fast", "--quiet", "--json")


@pytest.mark.usefixtures("shared_zygote")
def test_the_answer_of_a_search_for_trl_is_trls_own(here: Path, run: Run) -> None:
    """On a CPU its loss is TRL's, which no other config is measured with."""
    printed = run(*LLAMA, *NARROW, "--set", "compile=none", "--for", "trl", "--out", "run")
    assert printed.code == 0, printed.err
    result = (here / "run" / "result.yaml").read_text()
    assert "tool: trl" in result
    assert "own_loss: trl" in result
    exported = run("export", "run/result.yaml", "--to", "trl", "--strict")
    assert exported.code == 0, exported.err
    assert (here / "run" / "exports" / "trl.yaml").exists()


def test_a_predicted_answer_for_axolotl_is_axolotls_own(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfollowed(monkeypatch)
    card = ("--gpu", "rtx-4090", "--seq-len", "16", "--effective-batch", "4")
    adapters = ("--set", "lora_rank=8", "--set", "precision=bf16,bf16-mixed")
    adapters += ("--set", "quantization=none,nf4", "--set", "activation_checkpointing=none,full")
    given = (*card, *adapters, *NARROW, "--for", "axolotl", "--out", "run")
    printed = run("search", "--model", "llama", *given)
    assert printed.code == 0, printed.err
    exported = run("export", "run/result.yaml", "--to", "axolotl", "--strict")
    assert exported.code == 0, exported.err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--for", "axolotls"), "unknown tool 'axolotls'"),
        (("--for", "litgpt", "--task", "dpo"), "litgpt trains causal-lm"),
    ],
)
def test_a_tool_that_is_none_or_trains_something_else(
    run: Run, arguments: tuple[str, ...], reason: str
) -> None:
    printed = run(*LLAMA, *arguments, "--quiet")
    assert printed.code == 2
    assert reason in printed.err
