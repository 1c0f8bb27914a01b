"""What the script builds and steps is what autofit's own training builds and steps."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from autofit.core.config import Config
from autofit.core.hardware import GIB, Hardware
from autofit.core.hyperparameters import Hyperparameters
from autofit.export.fragments import KNOBS, Fragments, is_off
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.techniques import all_techniques
from autofit.training.build import build
from autofit.training.loop import train_step

CPU = Hardware("cpu", "a test's CPU", GIB, GIB, GIB, 2)
SPLIT = {"micro_batch_size": 2}
LORA = {"lora_rank": 8, "lora_targets": "all-linear"}
HALF = {"precision": "bf16-mixed"}

# transformers, peft and torchao warn of each other's ways; what they warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def module_of(script: str, name: str = "emitted") -> ModuleType:
    module = ModuleType(name)
    exec(compile(script, name, "exec"), module.__dict__)
    return module


def parameters(model: Any) -> Counter[tuple[Any, ...]]:
    """Shape, dtype and whether it is trained; not the untouched copy that peft keeps of a trained head."""
    named = [(name, each) for name, each in model.named_parameters() if ".original_module." not in name]
    return Counter((tuple(each.shape), each.dtype, each.requires_grad) for _, each in named)


@pytest.mark.parametrize(
    ("task", "knobs"),
    [
        ("causal-lm", {**SPLIT}),
        ("causal-lm", {"precision": "bf16"}),
        ("causal-lm", {**HALF, "attention": "eager", **SPLIT}),
        ("causal-lm", {**HALF, **LORA, **SPLIT, "activation_checkpointing": "full"}),
        ("causal-lm", {**LORA, "precision": "bf16", "lora_targets": "attention"}),
        ("causal-lm", {**LORA, "lora_targets": "all-linear+head", "optimizer": "adamw-foreach"}),
        ("causal-lm", {**LORA, **SPLIT, "precision": "fp16-mixed"}),
        ("masked-lm", {**HALF, **LORA}),
        ("masked-lm", {**SPLIT, "optimizer": "sgd", "activation_checkpointing": "full"}),
        ("sequence-classification", {**HALF, **LORA, **SPLIT}),
        ("sequence-classification", {**LORA, "precision": "bf16", "lora_targets": "all-linear+head"}),
        ("image-classification", {"precision": "bf16", **SPLIT}),
        ("image-classification", {**HALF, **LORA, "lora_targets": "attention", "optimizer": "adamw-8bit"}),
    ],
)
def test_the_script_takes_the_same_steps_as_autofit(
    emit: Callable[..., str], architectures: dict[str, Any], task: str, knobs: dict[str, Any]
) -> None:
    length = None if task == "image-classification" else 64
    named = HuggingFaceModel("tiny", task, architectures[task])
    workload = huggingface_workload(named, sequence_length=length, effective_batch_size=8)
    setup = build(workload, knobs, CPU, hyperparameters=Hyperparameters(lr=1e-3))
    script = module_of(emit(task, **dict(setup.config)))
    classes = architectures[task].get("num_labels", 2)
    model = script.build_model(None, classes) if task.endswith("classification") else script.build_model(None)
    assert parameters(model) == parameters(setup.model)

    ours = dict(setup.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".original_module." not in name:
                parameter.copy_(ours[name.replace("base_model.model.", "").replace(".modules_to_save.default", "")])
    optimizer = script.build_optimizer(model, 1e-3, 0.0)
    scaler = [torch.amp.GradScaler("cpu")] if setup.scaler else []
    batch = workload.batch(8)
    theirs = [script.train_step(model, optimizer, dict(batch), *scaler).item() for _ in range(3)]
    assert theirs == pytest.approx([train_step(setup, batch).item() for _ in range(3)], rel=1e-4)
    assert theirs[-1] < theirs[0]


def test_uneven_padding_weighs_every_label_alike(emit: Callable[..., str]) -> None:
    whole, split = module_of(emit()), module_of(emit(micro_batch_size=2, gradient_accumulation_steps=4))
    ids = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(8):
        labels[row, 2 + 8 * row :] = -100
    labels[6:] = -100  # a micro-batch with nothing to predict
    losses, gradients = [], []
    for script in (whole, split):
        torch.manual_seed(0)
        model = script.build_model(None)
        optimizer = script.build_optimizer(model, 1e-3, 0.0)
        optimizer.step = optimizer.zero_grad = lambda: None  # keeps the gradients to look at
        losses.append(script.train_step(model, optimizer, {"input_ids": ids, "labels": labels}).item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_every_value_of_every_technique_is_known_or_refused_by_name() -> None:
    """A technique without a row here must not be dropped: its `off` has to be one that `is_off` knows."""
    for technique in all_techniques():
        if technique.name in KNOBS:
            for value in technique.values:
                config = Config({"lora_rank": 8, "lora_targets": "all-linear", technique.name: value})
                assert KNOBS[technique.name](config, "causal-lm") is not None, (technique.name, value)
        else:
            assert is_off(technique.off)


def test_fragments_of_several_knobs_come_together() -> None:
    one = Fragments(imports=("a",), settings={"dtype": "x"}, held="one")
    two = Fragments(imports=("b",), settings={"attn": "y"}, forward="context")
    both = one.joined(two)
    assert both.imports == ("a", "b")
    assert both.settings == {"dtype": "x", "attn": "y"}
    assert (both.held, both.forward) == ("one", "context")
