"""sentence-transformers: its own Trainer trains three steps from the exported script."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests import tiny
from tests.export.sources import LORA, source

TOOL = tool_named("sentencetransformers")
INSTALLED = {"versions": {"transformers": transformers.__version__}}
WHOLE = {"micro_batch_size": 8, "gradient_accumulation_steps": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("embed", WHOLE),
    "cached": ("embed", {"activation_checkpointing": "full"}),
    "lora": ("embed", {**LORA, "optimizer": "adamw-4bit"}),
    "reranker": ("rerank", {"activation_checkpointing": "alternate"}),
    "lora-reranker": ("rerank", {**LORA, "precision": "bf16-mixed"}),
}


def exported(task: str, device: str = "cpu", **knobs: Any) -> Export:
    return write(TOOL, source(device, task, INSTALLED, **knobs))


def script_of(task: str, **knobs: Any) -> str:
    (text,) = exported(task, **knobs).files.values()
    return text


def trained(
    path: Path, monkeypatch: pytest.MonkeyPatch, task: str, knobs: dict[str, Any]
) -> tuple[Any, list[float]]:
    """The Trainer of a script after three steps of a tiny BERT, and its losses."""
    pytest.importorskip("sentence_transformers")
    is_pair = task == "embed"
    kind = "AutoModel" if is_pair else "AutoModelForSequenceClassification"
    weights = tiny.saved_encoder(path / "weights", kind)
    others = {
        **INSTALLED,
        "weights": str(weights),
        "sequence_length": 16,
        "targets": ("query", "value") if "lora_rank" in knobs else (),
        "heads": () if is_pair or "lora_rank" not in knobs else ("classifier",),
    }
    (text,) = write(TOOL, source("cpu", task, others, **knobs)).files.values()
    further = 'output_dir="output", max_steps=3, logging_steps=1, report_to="none", seed=1'
    script = path / "train_sentence_transformers.py"
    script.write_text(text.replace('output_dir="output"', further))

    rows = [
        {"passage": f"w{n} w3", "positive": f"w{n} w3", "anchor": f"w{n} w{n + 1}"}
        | {"query": f"w{n} w{n + 1}", "label": n % 2}
        for n in range(24)
    ]
    (path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(path)
    monkeypatch.setenv("HF_HOME", str(path / "home"))
    monkeypatch.setattr(sys, "argv", [str(script), "rows.jsonl"])
    before = dict(os.environ)
    made = runpy.run_path(str(script), run_name="__main__")
    os.environ.clear()
    os.environ.update(before)
    trainer = made["trainer"]
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_script_trains(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, knobs = CASES[case]
    trainer, losses = trained(tmp_path, monkeypatch, task, knobs)
    assert len(losses) == 3
    assert all(0 < loss < 10 for loss in losses)
    assert (tmp_path / "output").is_dir()

    weights = dict(trainer.model.named_parameters())
    learnt = {name: weight.dtype for name, weight in weights.items() if weight.requires_grad}
    if "lora_rank" in knobs:
        own = [name for name in learnt if "lora_" not in name]
        assert all("classifier.modules_to_save" in name for name in own)
        assert bool(own) == (task == "rerank")
        assert len(learnt) == 2 * 2 * 2 + len(own)
    expected = "bfloat16" if knobs.get("precision") == "bf16" else "float32"
    assert {str(dtype) for dtype in learnt.values()} == {f"torch.{expected}"}


@pytest.mark.filterwarnings("ignore")
def test_a_cached_loss_learns_what_the_whole_batch_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, knobs in (("whole", WHOLE), ("cached", {})):
        folder = tmp_path / name
        folder.mkdir()
        found.append(trained(folder, monkeypatch, "embed", knobs)[1])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_loss_over_the_batch_is_given_all_of_it() -> None:
    text = script_of("embed")
    assert "per_device_train_batch_size=8" in text
    assert "gradient_accumulation_steps=1" in text
    assert "loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)" in text
    assert "loss = MultipleNegativesRankingLoss(model)" in script_of("embed", **WHOLE)
    text = script_of("rerank")
    assert "per_device_train_batch_size=2" in text
    assert "gradient_accumulation_steps=4" in text


def test_what_it_does_otherwise_is_named() -> None:
    departures = {
        each.knob for each in exported("embed", kernels="liger", optimizer_offload="cpu").departures
    }
    assert departures == {"kernels", "optimizer_offload"}
    assert not exported("embed", attention="eager", compile="default").departures
    assert not exported("rerank", **LORA).departures


def test_quantised_weights_and_compiling_stand_in_the_script() -> None:
    text = script_of("rerank", **LORA, quantization="nf4", compile="default")
    assert "quantization_config=quantization" in text
    assert 'llm_int8_skip_modules=["score", "classifier", "pre_classifier"]' in text
    assert 'os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "1"' in text
    compile(text, "train_sentence_transformers.py", "exec")
