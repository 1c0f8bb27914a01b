"""What the script builds and steps is what autofit's own training builds and steps, and every value is known to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autofit.core.config import Config
from autofit.core.knobs import is_off
from autofit.core.tasks.causal_lm import CAUSAL_LM
from autofit.export.fragments import Case
from autofit.export.knobs import KNOBS
from autofit.techniques import all_techniques
from tests.export.emitted import check_same_steps, module_of, saved_weights, setup_for
from tests.tolerances import LOSS

SPLIT = {"micro_batch_size": 2}
LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
HALF = {"precision": "bf16-mixed"}
REFUSED = (
    "activation_offload",
    "parameter_offload",
)  # and their `off` is one that `is_off` knows

STREAMED = {("reference", "offloaded")}  # as parameter_offload

# transformers, peft and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("task", "knobs"),
    [
        ("causal-lm", {**HALF, **LORA, **SPLIT, "activation_checkpointing": "full"}),
        ("causal-lm", {**LORA, **SPLIT, "precision": "fp16-mixed"}),
        ("causal-lm", {**LORA, "lora_dora": True, "lora_rslora": True, "lora_alpha": 8.0}),
        ("causal-lm", {**LORA, "lora_plus": 16.0}),
        ("sequence-classification", {**HALF, "head_only": True, **SPLIT}),
        ("masked-lm", {**SPLIT, "optimizer": "sgd", "activation_checkpointing": "full"}),
        (
            "sequence-classification",
            {**LORA, "precision": "bf16", "lora_targets": "all-linear+head"},
        ),
        ("image-classification", {"precision": "bf16", **SPLIT}),
        (
            "image-classification",
            {**HALF, **LORA, "lora_targets": "attention", "optimizer": "adamw-8bit"},
        ),
    ],
)
def test_the_script_takes_the_same_steps_as_autofit(
    emit: Callable[..., str],
    architectures: dict[str, Any],
    tmp_path: Path,
    task: str,
    knobs: dict[str, Any],
) -> None:
    weights = saved_weights(task, architectures[task], tmp_path)
    setup = setup_for(task, architectures[task], knobs, weights)
    check_same_steps(module_of(emit(task, **dict(setup.config))), setup, weights)


def test_uneven_padding_weighs_every_label_alike(emit: Callable[..., str]) -> None:
    whole, split = (
        module_of(emit()),
        module_of(emit(micro_batch_size=2, gradient_accumulation_steps=4)),
    )
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(8):
        labels[row, 2 + 8 * row :] = -100
    labels[6:] = -100  # a micro-batch with nothing to predict
    losses, gradients = [], []
    for script in (whole, split):
        torch.manual_seed(0)
        model = script.build_model(None)
        optimizer = script.build_optimizer(model, 1e-3)
        optimizer.step = optimizer.zero_grad = lambda: None  # keeps the gradients to look at
        losses.append(
            script.train_step(model, optimizer, {"input_ids": ids, "labels": labels}).item()
        )
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=LOSS)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_every_value_of_every_technique_is_known_or_refused_by_name(
    architectures: dict[str, Any],
) -> None:
    """A technique without a row here must not be dropped: its `off` has to be one that `is_off` knows."""
    for technique in all_techniques():
        if technique.name not in KNOBS:
            assert technique.name in REFUSED
            assert is_off(technique.off)
        for value in technique.values if technique.name in KNOBS else ():
            if is_off(value) or (technique.name, value) in STREAMED:  # is not asked
                continue
            knobs = {
                "lora_rank": 8,
                "lora_targets": "all-linear",
                "compile": "default",
                technique.name: value,
            }
            case = Case(Config(knobs), CAUSAL_LM, "cuda", 8, 64, architectures["causal-lm"])
            assert KNOBS[technique.name](case) is not None, (technique.name, value)


def test_no_row_is_of_a_knob_that_does_not_exist() -> None:
    assert KNOBS.keys() <= {technique.name for technique in all_techniques()}
