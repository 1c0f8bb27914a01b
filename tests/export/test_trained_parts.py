"""train.py of a model of which parts are frozen: it trains what was measured; tools are not told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.core.errors import InputError
from autofit.core.workload import Hyperparameters
from autofit.export.tool import write
from autofit.export.tools import all_tools, tool_named
from autofit.export.unsaid import unsaid
from autofit.models.fake_quantised import FakeQuantisation
from autofit.models.trained_parts import train_parts
from autofit.training.build import build
from tests.export.emitted import CPU, check_same_steps, loaded, module_of, saved_weights, setup_for
from tests.export.sources import source

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS = ("model.layers.1", "lm_head")
Emit = Callable[..., str]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16-mixed", "activation_checkpointing": "full"},
        {"optimizer_in_backward": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("asks_inputs", [False, True])
def test_the_script_trains_the_same_parts(
    emit: Emit,
    architectures: dict[str, Any],
    tmp_path: Path,
    knobs: dict[str, Any],
    asks_inputs: bool,
) -> None:
    architecture = {**architectures["causal-lm"], "tie_word_embeddings": False}
    weights = saved_weights("causal-lm", architecture, tmp_path)
    plain = setup_for("causal-lm", architecture, knobs, weights)
    model = loaded("causal-lm", weights)
    model.config.use_cache = False
    train_parts(model, PARTS)
    setup = build(plain.workload, knobs, CPU, model=model, hyperparameters=Hyperparameters(lr=1e-3))
    plain.close()

    frozen = {"kind": "preset", "model": "tiny", "parts": list(PARTS), "asks_inputs": asks_inputs}
    others = {"model_config": architecture, "source": frozen}
    script = module_of(emit("causal-lm", others, **dict(setup.config)))
    low = knobs.get("precision", "fp32") != "fp32"
    model = check_same_steps(script, setup, weights, rel=2e-3 if low else 1e-4)
    hooks = getattr(model, "_require_grads_hooks", [])
    assert bool(hooks) is asks_inputs


def test_adapters_freeze_all_parts_anyway(emit: Emit) -> None:
    frozen = {"kind": "preset", "model": "tiny", "parts": ["lm_head"]}
    text = emit("causal-lm", {"source": frozen}, lora_rank=8, lora_targets="all-linear")
    assert "startswith(trained)" not in text


@pytest.mark.parametrize("tool", all_tools(), ids=lambda tool: tool.name)
def test_tools_that_are_not_told_what_to_freeze_are_refused(tool: Any) -> None:
    whole = source(precision="bf16-mixed")
    if tool.why_not(whole):
        pytest.skip("it trains something else")
    frozen = replace(whole, parts=PARTS)
    with pytest.raises(InputError, match="lm_head is trained here"):
        write(tool, frozen)


def test_the_script_rounds_as_was_measured(
    emit: Emit, architectures: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("torchao.quantization.qat")
    architecture = architectures["causal-lm"]
    weights = saved_weights("causal-lm", architecture, tmp_path)
    knobs = {"precision": "bf16-mixed"}
    plain = setup_for("causal-lm", architecture, knobs, weights)
    model = loaded("causal-lm", weights)
    model.config.use_cache = False
    rounds = FakeQuantisation(32)
    rounds.apply(model)
    setup = build(plain.workload, knobs, CPU, model=model, hyperparameters=Hyperparameters(lr=1e-3))
    plain.close()

    source = {"kind": "preset", "model": "tiny", "rounds": rounds.to_source()}
    others = {"model_config": architecture, "source": source}
    script = module_of(emit("causal-lm", others, **dict(setup.config)))
    check_same_steps(script, setup, weights, rel=2e-3)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"texts": 8}, "several texts in a sample"),
        ({"head": "values"}, "a head of another tool"),
        ({"spares_frozen": True}, "checkpoints of some blocks alone"),
        ({"tiles": {}}, "MLPs in tiles"),
        ({"options": {"num_hidden_layers": 9}}, "blocks that are added"),
    ],
)
def test_what_no_export_has_words_for_is_refused(
    emit: Emit, changed: dict[str, Any], what: str
) -> None:
    told = {"kind": "preset", "model": "tiny", **changed}
    assert unsaid(told) == what
    with pytest.raises(InputError, match=f"train.py cannot be written for {what}"):
        emit("causal-lm", {"source": told})
    with pytest.raises(InputError, match=f"is not told of {what}"):
        write(tool_named("trl"), replace(source(precision="bf16-mixed"), unsaid=what))
    assert unsaid({"options": {"num_labels": 3}}) is None
