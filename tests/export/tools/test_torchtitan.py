"""torchtitan: a function that makes its config, of flavours and names of its own."""

from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.export.tool import Export, write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, LORA, source


def exported(others: dict[str, Any] | None = None, **knobs: Any) -> Export:
    return write(tool_named("torchtitan"), source("cuda", "causal-lm", others, **knobs))


def script(**knobs: Any) -> str:
    text = exported(None, **knobs).files["torchtitan_config.py"]
    compile(text, "torchtitan_config.py", "exec")
    return text


def test_flavours_it_does_not_have_are_refused() -> None:
    with pytest.raises(
        InputError, match="no flavour of torchtitan's is known here for path/to/weights"
    ):
        exported({"weights": "path/to/weights"})
    text = exported({"weights": "Qwen/Qwen3-8B"}).files["torchtitan_config.py"]
    assert "from torchtitan.models.qwen3 import model_registry" in text


def test_what_is_told_stands_in_the_function() -> None:
    text = script(**CASES["full"])
    assert 'dtype="bfloat16"' in text
    assert "activation_checkpoint=FullAC.Config()" in text
    assert "local_batch_size=2" in text
    assert "global_batch_size=8" in text
    assert 'target_modules=["wqkv", "wo", "w1", "w2", "w3"]' in script(**LORA)
    compiled = script(**CASES["compiled"])
    assert "CompileConfig(enable=True)" in compiled
    assert "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss" in compiled
    assert "Float8LinearConverter" in script(precision="fp8")
    assert "MemoryBudgetAC.Config(memory_budget=0.5)" in script(
        activation_checkpointing="budget-0.5"
    )


def test_what_it_has_not_is_named() -> None:
    named = {each.knob: each.may_not_fit for each in exported(None, **CASES["qlora"]).departures}
    assert named == {"quantization": True, "optimizer": True}
    assert not exported(None, **CASES["compiled"]).departures
