"""Every parameter of every public function, given a dozen wrong values: one sentence that names it, at once."""

import contextlib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.api.what_if import what_if
from autofit.core.errors import InputError
from autofit.core.options import SearchOptions
from tests.cli.command import RESULT


class Mute:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


JUNK: dict[str, Any] = {
    "3": 3,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "x": "x",
    "empty": "",
    "nul": "a\0b",
    "half": "\ud800",
    "True": True,
    "None": None,
    "[]": [],
    "[3]": [3],
    "{}": {},
    "{1: 2}": {1: 2},
    "{'foo': 1}": {"foo": 1},
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**400,
    "-huge": -(10**400),
    "bytes": b"x",
    "path": Path("nowhere"),
    "function": lambda *_: None,
    "tensor": torch.zeros(2),
    "mute": Mute(),
}
# What each parameter takes of these; all else is refused.
NAMES = "x empty nul half"  # of cards and optimizers, which are looked up later
OPTIONS = {
    "gpu_mem": "3 1.5 None",
    "gpu": f"{NAMES} None",
    "device": "None",
    "mem": "3 1.5 None",
    "host_mem": "3 1.5 None",
    "margin": "0",
    "space": "None",
    "set": "{}",
    "trials": "3",
    "fast": "True",
    "time_limit": "3 1.5 None inf",
    "tolerance": "0",
    "prefer": "",
    "seed": "3 0 -1",
    "workers": "3 None",
    "executor": "",
    "devices": "3",
    "nodes": "3",
    "link": f"{NAMES} None",
    "out": "x path None",
    "resume": "",  # without `out`
    "store": "True",
    "memory_snapshot": "True",
    "probe_timeout": "3 1.5",
}
OF_FIT = {
    "model": "",
    "loader": "",
    "loss": "function",
    "split": "None",
    "count": "None function",
    "frozen": "None {}",
    "optimizer": "None function",
    "lr": "3 1.5 None",
    "weight_decay": "3 0 1.5",
    "schedule": "",
    "warmup_steps": "3 0 huge",
    "max_grad_norm": "3 1.5 None",
    "epochs": "3 None huge",
    "steps": "3 None huge",
    "config": "None {} foo",
    "eval_loader": "x empty nul half None [] [3] {} {1:2} foo bytes function tensor",  # looked into when it is built
    "eval_every": "None",
    "metrics": "empty [] {}",
    "keep_best": "",
    "callbacks": "empty []",
    "output_dir": "x path None",
    "checkpoint_every": "3 huge",
    "keep_last": "3 huge",
    "search": "",
    "worst_case": "None",
    "peek": "3",
    "progress": "True None",
    "listener": "None function",
    "restart": "None function",
    "devices": "3 None",
    "nodes": "",
}
OF_WORKLOAD = {
    "model": "function",
    "batch": "function",
    "loss": "None function",
    "effective_batch_size": "3",
    "unit": "",
    "sequence_length": "3 None",
    "task": "",
    "name": NAMES,
    "reduction": "",
    "split": "None function",
    "count": "None function",
    "optimizer": "None function",
    "frozen": "{}",
    "precomputes": "True",
    "keeps": "None",
    "varying": "True",
    "packing": "True None",
    "padding": "1.5 nan inf",
    "document_tokens": "3 0 -1 True None huge -huge",
    "data_tokens": "3 0 -1 True None huge -huge",
    "data": f"{NAMES} None",
    "form": f"{NAMES} None",
    "traits": "None",
    "source": "{} {1:2} foo",
    "tool": f"{NAMES} None",
    "rules": "{} {1:2} foo",
    "notes": "",
}
SIZES = {
    "task": "None",
    "teacher": "None",
    "seq_len": "3 None",
    "resolution": "None",
    "frames": "None",
    "train_text_encoders": "",  # of a language model
    "effective_batch": "3 None",
    "trust_remote_code": "True",
    "loss_options": "None {}",
}
TAKEN: dict[str, dict[str, str]] = {
    "search": {
        "tool": "None",
        "model": "",
        "loader": "None",
        "loss": "None",
        "split": "None",
        "count": "None",
        "frozen": "None",
        "listener": "None function",
        "judge": "None",
        "data": "None",
        "weights": "None",
        **SIZES,
        **OPTIONS,
        "gpu": "None",
    },
    "fit": {**OPTIONS, **OF_FIT},
    "estimate": {
        "model": "",
        "config": "None {} {1:2} foo",
        **SIZES,
        "gpu_mem": OPTIONS["gpu_mem"],
        "set": "{} foo",  # a knob that the model's own code may register
    },
    "plan_grpo": {
        "model": "",
        "config": "None {} {1:2} foo",
        "generations": "",  # 3 does not divide the effective batch
        "prompt_len": "3",
        "completion_len": "3",
        "vllm": "",
        "vllm_tensor_parallel": "3",
        "beta": "3 0 1.5",
        "effective_batch": "",
        "trust_remote_code": "True",
        "output": "x path None",
    },
    "tune": {
        "file": "",
        "nodes": "3",
        "model": "None",
        "seq_len": "3 None",
        "task": "None",
        "keep": "[]",
        "free": "[]",
        "devices": "3 None",
        "verify_in_tool": "",
        "tool_python": "None",
        "listener": "None function",
    },
    "export": {
        "result": "",
        "to": "",
        "output": "x path None",
        "strict": "",
        "tool_version": "None",
    },
    "training_arguments": {
        "result": "",
        "output_dir": "x path",
        "model": "None",
        "learning_rate": "3 0 -1 1.5 True nan inf huge -huge",
    },
    "explain": {"result": ""},
    "Workload": OF_WORKLOAD,
    "Config": {"values": "None {} foo"},
    "register": {"technique": ""},
}
CALLED = {  # in messages, where that is not the name of the parameter
    "gpu": "gpu|GPU",
    "gpu_mem": "GPU memory",
    "host_mem": "host memory",
    "mem": "the memory",
    "lr": "learning rate",
    "epochs": "length of training",
    "steps": "length of training",
    "resume": "resume",
    "time_limit": "time",
    "probe_timeout": "timeout",
    "seq_len": "sequence",
    "loss_options": "loss_options|loss with options|option of the loss",
    "sequence_length": "sequence length",
    "effective_batch": "effective batch size",
    "effective_batch_size": "effective batch size",
    "worst_case": "batch",
    "loader": "loader|batch",
    "set": "set|knob",
    "config": "config|file|knob",
    "result": "result|file|directory|there|config|knob|batch",
    "to": "tool",
    "tool_version": "version",
    "verify_in_tool": "verify_in_tool|run for a card",
    "values": "config|knob",
    "technique": "register|technique",
}
FOLDED = {"{1:2}": "{1: 2}", "foo": "{'foo': 1}"}


class ReachedError(BaseException):
    """Nothing is wrong, and what takes seconds would begin."""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Calls a public function with one argument changed, up to where a process would start or a model be built."""

    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "result.yaml").write_text(RESULT)
    (tmp_path / "axolotl.yaml").write_text("base_model: meta-llama/Llama-3.2-1B\nbf16: true\n")
    fit, estimate = (
        importlib.import_module("autofit.api.fit"),
        importlib.import_module("autofit.api.estimate"),
    )
    for room in ("tuning.measured", "tuning.predicted", "tuning.target", "probe"):
        monkeypatch.setattr(f"autofit.{room}.LocalExecutor", reached)
    monkeypatch.setattr(fit.Session, "run", reached)
    monkeypatch.setattr(fit, "run_on_devices", reached)
    monkeypatch.setattr(estimate, "structure_traits", reached)
    model, batch = nn.Linear(4, 2), (torch.zeros(4, 4), torch.zeros(4))
    of_fit = {
        "model": model,
        "loader": [batch, batch],
        "loss": lambda m, b: m(b[0]).sum(),
        "lr": 0.1,
        "config": {},
    }
    given: dict[str, dict[str, Any]] = {
        "search": {"model": "tiny-llama", "device": "cpu"},
        "fit": of_fit,
        "estimate": {"model": "tiny-llama"},
        "plan_grpo": {"model": "tiny-llama", "gpu": "h100"},
        "tune": {"file": "axolotl.yaml", "gpu": "h100"},
        "export": {"result": "result.yaml", "to": "trl"},
        "training_arguments": {"result": "result.yaml", "output_dir": "out"},
        "Workload": {"model": lambda: model, "batch": lambda n: batch},
        "Config": {},
    }

    def called(function: str, /, **changed: object) -> None:
        with contextlib.suppress(ReachedError):
            getattr(autofit, function)(**{**given.get(function, {}), **changed})

    return called


@pytest.mark.filterwarnings("ignore")  # of Trainer's arguments
@pytest.mark.parametrize(
    ("name", "parameter"), [(name, each) for name, all_ in TAKEN.items() for each in all_]
)
def test_wrong_values(call: Callable[..., object], name: str, parameter: str) -> None:
    fine = {FOLDED.get(word, word) for word in TAKEN[name][parameter].split()}
    beside: dict[str, object] = (
        {"device": None} if name == "search" and parameter in ("gpu", "gpu_mem") else {}
    )
    if name == "fit" and parameter in ("space", "set", "optimizer"):
        beside = {"config": None}
    for word, value in JUNK.items():
        if word in fine:
            call(name, **{**beside, parameter: value})
            continue
        with pytest.raises(InputError) as caught:
            call(name, **{**beside, parameter: value})
        message = str(caught.value)
        assert "\n" not in message
        assert len(caught.value.message) < 600, message
        words = CALLED.get(parameter, parameter).split("|")
        assert any(each in message for each in words), (word, message)


def test_every_parameter_is_tried() -> None:
    for name, parameters in TAKEN.items():
        function = getattr(autofit, name)
        known = set(inspect.signature(function).parameters) - {
            "self",
            "options",
            "overrides",
            "knobs",
        }
        assert known <= parameters.keys(), name
    assert TAKEN["search"].keys() >= SearchOptions.model_fields.keys() - {"set"}
    assert {
        "search",
        "fit",
        "estimate",
        "export",
        "explain",
        "training_arguments",
        "register",
    } <= TAKEN.keys()


def test_what_if_takes_a_prediction() -> None:
    for value in JUNK.values():
        with pytest.raises(InputError, match="what_if takes what predict gives"):
            what_if(value)
