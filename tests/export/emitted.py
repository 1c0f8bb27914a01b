"""Running emitted scripts in this process, and comparing what they do with autofit's own training."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes.optim import GlobalOptimManager

from autofit.core.hardware import GIB, Hardware
from autofit.core.task import TEACHER
from autofit.core.tasks import TASKS
from autofit.core.workload import Hyperparameters
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.step import train_step

CPU = Hardware("cpu", "a test's CPU", GIB, GIB, GIB, 2)


def module_of(script: str, name: str = "emitted") -> ModuleType:
    """The script, imported; run where its name is __main__."""
    module = ModuleType(name)
    exec(compile(script, name, "exec"), module.__dict__)
    return module


def losses_printed(script: str, *arguments: str | Path) -> list[float]:
    """What the script says of its steps when it is run with these arguments, in this process."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        # A script has a process of its own: what an earlier Trainer told bitsandbytes of its layers does not reach it.
        patch.setattr(GlobalOptimManager, "_instance", None)
        module_of(script, "__main__")
    return _losses_in(printed.getvalue())


def losses_alone(script: Path, *arguments: str | Path) -> list[float]:
    """The same of a script that is run by its command line: a process of its own takes six seconds to import torch."""
    # One thread: on a busy machine two that wait for each other were several times slower.
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env=offline, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    return _losses_in(run.stdout)


def _losses_in(printed: str) -> list[float]:
    return [
        float(loss)
        for loss in re.findall(r"^step \d+: loss ([^\s,]+)", printed, flags=re.MULTILINE)
    ]


def model_of(script: ModuleType, weights: Path | None = None) -> Any:
    """What the script trains."""
    return script.build_model(str(weights) if weights else None)


def parameters(model: Any) -> Counter[tuple[Any, ...]]:
    """Shape, dtype and whether it is trained; not the untouched copy that peft keeps of a trained head."""
    named = [
        (name, each) for name, each in model.named_parameters() if ".original_module." not in name
    ]
    return Counter((tuple(each.shape), each.dtype, each.requires_grad) for _, each in named)


def saved_weights(task: str, architecture: dict[str, Any], path: Path, seed: int = 0) -> Path:
    """Random float32 weights, as a directory that a script and autofit can both start from."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**architecture)
    getattr(transformers, TASKS[task].auto_class).from_config(
        config, dtype=torch.float32
    ).save_pretrained(path)
    return path


def setup_for(
    task: str,
    architecture: dict[str, Any],
    knobs: dict[str, Any],
    weights: Path,
    teacher: Path | None = None,
    loss_options: Mapping[str, Any] | None = None,
) -> Setup:
    """autofit's own training of the same weights."""
    length = None if task == "image-classification" else 64
    frozen = {} if teacher is None else {TEACHER: partial(loaded, task, teacher)}
    workload = huggingface_workload(
        HuggingFaceModel("tiny", task, architecture),
        sequence_length=length,
        effective_batch_size=8,
        frozen=frozen,
        loss_options=loss_options,
    )
    model = loaded(task, weights)
    model.config.use_cache = False
    return build(workload, knobs, CPU, model=model, hyperparameters=Hyperparameters(lr=1e-3))


def loaded(task: str, weights: Path) -> Any:
    """The model of a directory, in float32."""
    return getattr(transformers, TASKS[task].auto_class).from_pretrained(
        weights, dtype=torch.float32
    )


def take_over(model: Any, setup: Setup) -> None:
    """Give the script's model what is random in ours: adapters and new heads."""
    ours = dict(setup.trainable())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(
                    ours[
                        name.replace("base_model.model.", "").replace(
                            ".modules_to_save.default", ""
                        )
                    ]
                )


def losses_of(
    script: ModuleType, model: Any, batch: Any, *, scaled: bool = False, steps: int = 3
) -> list[float]:
    """The losses of some steps of the script."""
    scaler = [torch.amp.GradScaler("cpu")] if scaled else []
    if hasattr(script, "step_in_backward"):
        script.step_in_backward(model, 1e-3)
        return [script.train_step(model, dict(batch)).item() for _ in range(steps)]
    optimizer = script.build_optimizer(model, 1e-3)
    return [script.train_step(model, optimizer, dict(batch), *scaler).item() for _ in range(steps)]


def check_same_steps(script: ModuleType, setup: Setup, weights: Path, *, rel: float = 1e-4) -> Any:
    """The script builds the same parameters, and its losses are those of autofit and fall; returns its model."""
    model = model_of(script, weights)
    assert parameters(model) == parameters(setup.model)
    take_over(model, setup)
    batch = setup.workload.batch(8)
    theirs = losses_of(script, model, batch, scaled=bool(setup.scaler))
    ours = [train_step(setup, batch).item() for _ in range(3)]
    setup.close()
    assert theirs == pytest.approx(ours, rel=rel)
    assert theirs[-1] < theirs[0]
    return model
