"""Scripts with other optimizers: the same steps as autofit's, with state where and as small as it is said to be."""

import functools
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.emitted import (
    check_same_steps,
    losses_of,
    model_of,
    module_of,
    saved_weights,
    setup_for,
)

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
CUDA = {"hardware": {"device": "cuda", "name": "x", "budget_gib": 8.0}}
Emit = Callable[..., str]


@pytest.mark.parametrize(
    ("task", "kind", "knobs"),
    [
        ("causal-lm", None, {"optimizer": "adafactor", "precision": "bf16", **LORA}),
        ("causal-lm", None, {"optimizer": "adamw-master", "precision": "bf16"}),
        ("causal-lm", None, {"optimizer": "muon"}),
        ("masked-lm", None, {"optimizer": "muon", "optimizer_in_backward": True}),
        (
            "causal-lm",
            "gpt2",
            {"optimizer_in_backward": True, "loss": "chunked", "optimizer": "adamw-8bit"},
        ),
        (
            "causal-lm",
            None,
            {
                "optimizer_in_backward": True,
                "quantization": "nf4",
                "optimizer": "adafactor",
                **LORA,
            },
        ),
        (
            "masked-lm",
            None,
            {"optimizer_in_backward": True, "optimizer": "adamw-master", "precision": "bf16"},
        ),
    ],
)
def test_other_optimizers_take_the_same_steps_as_autofit(
    emit: Emit,
    architectures: dict[str, Any],
    tmp_path: Path,
    task: str,
    kind: str | None,
    knobs: dict[str, Any],
) -> None:
    architecture = architectures[kind or task]
    weights = saved_weights(task, architecture, tmp_path)
    setup = setup_for(task, architecture, knobs, weights)
    script = module_of(emit(task, {"model_config": architecture}, **dict(setup.config)))
    check_same_steps(script, setup, weights, rel=1e-3 if knobs.get("precision") else 1e-4)


def test_stepping_in_the_backward_leaves_no_gradient_and_decays_matrices_only(emit: Emit) -> None:
    script = module_of(emit(optimizer="sgd", optimizer_in_backward=True))
    assert not hasattr(script, "build_optimizer")
    model = model_of(script)
    script.WEIGHT_DECAY = 0.5
    script.step_in_backward(model, 0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    zero = sum((parameter * 0).sum() for parameter in model.parameters())
    zero.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        torch.testing.assert_close(
            parameter.detach(), before[name] * (0.95 if parameter.dim() >= 2 else 1.0)
        )


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ("adamw-4bit", "from torchao.optim import AdamW4bit"),
        ("adamw-fp8", "from torchao.optim import AdamWFp8"),
        ("adamw-8bit-sr", "from torchao.optim import AdamW8bit"),
        ("adamw-sr", "from torchao.optim import _AdamW"),
        ("paged-adamw-8bit", "from bitsandbytes.optim import PagedAdamW8bit"),
        ("paged-adamw", "from bitsandbytes.optim import PagedAdamW"),
        ("lion-8bit", "from bitsandbytes.optim import Lion8bit"),
    ],
)
@pytest.mark.parametrize("in_backward", [False, True])
def test_optimizers_of_libraries_are_made_for_the_groups(
    emit: Emit, optimizer: str, made: str, in_backward: bool
) -> None:
    """Their steps are compiled, or need a GPU."""
    script = module_of(
        text := emit(others=CUDA, optimizer=optimizer, optimizer_in_backward=in_backward)
    )
    assert made in text
    measured_with = [
        f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers")
    ]
    needed = f"It needs {', '.join(measured_with)} and {made.split()[1].partition('.')[0]}"
    assert needed in " ".join(text.split())
    if not in_backward:
        weight = torch.nn.Linear(8, 8)
        script.WEIGHT_DECAY = 0.25
        found = script.build_optimizer(weight, 1e-3)
        assert made.split()[-1] in [kind.__name__ for kind in type(found).__mro__]
        assert getattr(found, "bf16_stochastic_round", False) is optimizer.endswith("-sr")
        assert [float(group["weight_decay"]) for group in found.param_groups] == [0.25, 0.0]
        assert [float(group["lr"]) for group in found.param_groups] == pytest.approx([1e-3, 1e-3])


@pytest.mark.parametrize("optimizer", ["adamw-4bit", "adamw-fp8"])
def test_torchaos_optimizers_train_on_a_cpu(
    emit: Emit, architectures: dict[str, Any], optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matrices of one shape, of 4096 elements: a step is captured for every shape. What Inductor makes of it takes
    2 s each, and is tested beside the knob."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    square = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    architecture = {
        **architectures["causal-lm"],
        **square,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    script = module_of(emit("causal-lm", {"model_config": architecture}, optimizer=optimizer))
    ids = torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(0))
    losses = losses_of(script, model_of(script), {"input_ids": ids, "labels": ids})
    assert losses[-1] < losses[0] - 0.02


def test_offloaded_state_is_that_of_a_fused_adamw_on_the_host(emit: Emit) -> None:
    text = emit(
        others=CUDA, optimizer_offload="cpu", micro_batch_size=2, gradient_accumulation_steps=4
    )
    compile(text, "emitted", "exec")
    assert "return CPUOffloadOptimizer([matrices, others], AdamW, lr=lr, fused=True)" in text
    assert "from torchao.optim import CPUOffloadOptimizer" in text
