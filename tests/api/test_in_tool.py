"""A tuned file, trained by its own tool: what is checked before a search, and what is said after."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import autofit
from autofit.api import in_tool
from autofit.api.in_tool import InTool, Said, python_of_tool, train_in_tool
from autofit.api.staging import end_tokenizer, long_texts
from autofit.api.tool_file import Reading, read
from autofit.core.budget import Budget
from autofit.core.errors import InputError
from autofit.core.hardware import GIB
from autofit.core.measurement import Measurement, Outcome, PeakBytes, StepSeconds
from autofit.core.result import Result
from autofit.export.runs import RUNS
from autofit.export.runs.run import Stage
from tests import tiny

FILE = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_cpu": True,
    "max_grad_norm": 0.0,
    "optim": "adamw_torch_fused",
}
# In place of a tool: it holds a matrix, its gradient and a momentum, 12 MB.
PROGRAM = """
import sys, torch, yaml
from pathlib import Path
given = yaml.safe_load(Path("training_arguments.yaml").read_text())
assert Path("train_transformers.py").exists()
model = torch.nn.Linear(1000, 1000, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if {fails}:
    print("\\n".join(str(line) for line in range(300)), "the end is near", sep="\\n")
    raise SystemExit(3)
for step in range(given["max_steps"]):
    model(torch.ones(10, 1000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NEEDED = 12_000_000


@pytest.fixture
def found(tmp_path: Path) -> Reading:
    """A file of transformers', for a model that has enough tokens."""
    path = tmp_path / "arguments.yaml"
    path.write_text(yaml.safe_dump(FILE))
    reading = read(path, model="tiny-llama", seq_len=16, device="cpu")
    return replace(reading, workload=tiny.llama_workload(vocab_size=300, sequence_length=16))


def result_of(folder: Path, budget: int, said: int) -> Result:
    best = Measurement(
        config=autofit.Config({}),
        outcome=Outcome.FITS,
        peak_bytes=PeakBytes(allocated=said),
        step_seconds=StepSeconds(1e-9, 1e-9, 1e-9),
    )
    return Result(
        model="tiny",
        workload={},
        source={},
        hardware=tiny.CPU,
        budget=Budget(budget, GIB),
        versions={},
        best=best,
        trials=(),
        tiers={},
        skipped={},
        stopped_by="space",
        space_size=1,
        search_seconds=0.0,
        run_directory=str(folder),
    )


def trained(
    found: Reading,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    budget: int = GIB,
    said: int = NEEDED,
    fails: bool = False,
) -> InTool:
    """What becomes of a program in place of the tool."""
    text = PROGRAM.format(fails=fails)
    run = replace(RUNS["transformers"], program=lambda keys: ("-c", text))
    monkeypatch.setitem(RUNS, "transformers", run)
    python = python_of_tool(found, None, "cpu")
    told = Said.of(result_of(folder, budget, said), None)
    keys = found.document.keys
    return train_in_tool(python, found, keys=keys, after=found.before, said=told)


def test_its_peak_and_its_speed_stand_beside_what_was_said(
    found: Reading, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    took = trained(found, monkeypatch, tmp_path)
    assert took.failed is None
    assert took.peak_bytes == pytest.approx(NEEDED, rel=0.01)
    assert took.tokens_per_second
    (note,) = took.notes  # of the speed
    assert note.startswith("transformers trains ")
    assert note.endswith("100% fewer than was said.")
    assert took.to_dict()["said_bytes"] == NEEDED


def test_a_tool_over_its_budget_has_not_trained(
    found: Reading, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near = trained(found, monkeypatch, tmp_path, budget=NEEDED * 9 // 10, said=NEEDED * 10 // 9)
    assert near.notes[0] == "transformers needs 0.011 GiB, 10% less than was said."
    assert near.failed is not None
    assert near.failed.startswith("transformers needs more than the 0.010 GiB that it may use.")
    assert near.peak_bytes == pytest.approx(NEEDED, rel=0.01)

    far = trained(found, monkeypatch, tmp_path, budget=NEEDED // 3)
    assert far.failed is not None
    assert far.failed.startswith("transformers needs more than the 0.004 GiB")
    assert far.peak_bytes is None


def test_of_a_tool_that_fails_the_last_lines_are_kept(
    found: Reading, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    took = trained(found, monkeypatch, tmp_path, fails=True)
    assert took.log == tmp_path / "tool.log"
    assert took.failed == (
        f"transformers did not train 6 steps from the tuned file. Its last lines are in {took.log}."
    )
    lines = took.log.read_text().splitlines()
    assert lines[-1] == "the end is near"
    assert len(lines) == 200
    assert found.path is not None
    assert yaml.safe_load(found.path.read_text()) == FILE


def test_what_cannot_be_verified_is_said_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.api.tune.search", lambda *_, **__: pytest.fail("it searched"))
    path = tmp_path / "axolotl.yaml"
    path.write_text("base_model: tiny-llama\nmicro_batch_size: 1\n")
    given: dict[str, Any] = {"device": "cpu", "mem": 1, "verify_in_tool": True}
    with pytest.raises(InputError, match=f"axolotl is not installed for {sys.executable}"):
        autofit.tune(path, **given)
    with pytest.raises(InputError, match="/nowhere cannot be run as Python"):
        autofit.tune(path, **given, tool_python="/nowhere")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    with pytest.raises(InputError, match=f"axolotl is not installed for {tmp_path}/python"):
        autofit.tune(path, **given, tool_python="./python")
    with pytest.raises(InputError, match="none is asked"):
        autofit.tune(path, device="cpu", mem=1, tool_python=sys.executable)
    if in_tool.why_no_gpu():
        with pytest.raises(InputError, match="axolotl cannot be run for a card"):
            autofit.tune(path, gpu="rtx-4090", verify_in_tool=True)

    path.write_text("base_model: tiny-llama\nrl: dpo\n")
    with pytest.raises(InputError, match="trains dpo, and a tool is run for causal-lm alone"):
        autofit.tune(path, **given)
    path.write_text("base_model: tiny-llama\nmicro_batch_size: 1\n")
    with pytest.raises(InputError, match="is for 2 devices, and a tool is run on one"):
        autofit.tune(path, **given, devices=2)


def test_a_model_of_few_tokens_has_no_tokenizer(found: Reading) -> None:
    few = replace(found, workload=tiny.llama_workload())
    with pytest.raises(InputError, match="has 64 tokens, and rows for a tool need 256"):
        python_of_tool(few, None, "cpu")


def test_texts_are_as_long_as_a_sample_with_the_token_that_ends_it(tmp_path: Path) -> None:
    tokenizer: Any = end_tokenizer()
    texts = long_texts(3, 40)
    assert len(set(texts)) == 3
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [39] * 3
    ended = texts[0] + tokenizer.eos_token
    assert tokenizer(ended)["input_ids"][-1] == tokenizer.eos_token_id
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert len(again(ended)["input_ids"]) == 40


def test_a_stage_is_what_a_tool_is_run_on(found: Reading, tmp_path: Path) -> None:
    import transformers
    from datasets import load_from_disk

    model: Any = found.workload.model
    stage: Stage = in_tool.staged(
        model, tmp_path / "stage", name="a-name", samples=3, tokens=16, steps=2
    )
    made = transformers.AutoModelForCausalLM.from_pretrained(stage.weights)
    assert made.config.vocab_size == 300
    assert stage.weights.name == "a-name"
    rows = load_from_disk(str(stage.tokens))
    assert [len(ids) for ids in rows["input_ids"]] == [16] * 3
