"""What a command printed, and the models and settings that tests of commands share."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

CPU = ("--device", "cpu", "--mem", "1")
LLAMA = ("search", "--model", "llama", *CPU, "--seq-len", "16", "--effective-batch", "4")
PLAIN = (*LLAMA, "--set", "precision=fp32", "--set", "optimizer=adamw", "--set", "lora_rank=0")
PLAIN += ("--set", "compile=none", "--set", "activation_checkpointing=none,full", "--out", "run")

RESULT = """
autofit: 1
model: tiny-llama
workload: {task: causal-lm, sequence_length: 2048, effective_batch_size: 32}
source: {kind: preset, model: tiny-llama}
hardware: {device: cpu, name: CPU, memory_gib: 1.0, budget_gib: 1.0, margin: 0.05}
config: {precision: fp32, micro_batch_size: 4, gradient_accumulation_steps: 8}
"""
MINE = """
import torch
from torch import nn
from autofit import Workload

def batch(n):
    return {"input": torch.ones(n, 4)}

def loss(model, batch):
    return model(**batch).square().mean()

def net():
    return nn.Linear(4, 2)

def good():
    return Workload(model=net, batch=batch, loss=loss, effective_batch_size=4)

def raises():
    raise ValueError("no such data set")

def broken_factory():
    def broken():
        raise KeyError("hidden_size")
    return Workload(model=broken, batch=batch, loss=loss)

def no_model():
    return Workload(model=dict, batch=batch, loss=loss)

def frozen():
    return Workload(model=lambda: net().requires_grad_(False), batch=batch, loss=loss)

def vector():
    return Workload(model=net, batch=batch, loss=lambda model, batch: model(**batch).mean(dim=0))

def constant():
    return Workload(model=net, batch=batch, loss=lambda model, batch: torch.zeros(()))

def number():
    return Workload(model=net, batch=batch, loss=lambda model, batch: 1.0)

def short_batch():
    return Workload(model=net, batch=lambda n: batch(1), loss=loss)

def wrong_batch():
    return Workload(model=net, batch=lambda n: {"input": torch.ones(n, 5)}, loss=loss)
"""


class Output(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Output]


def assert_error(printed: Output, *words: str, as_json: bool = True) -> None:
    """One sentence on stderr and no traceback; with --json one object on stdout that says the same."""
    assert printed.code == 2, printed
    assert printed.err.count("\n") == 1, printed.err
    assert printed.err.startswith("autofit: ")
    assert all(word in printed.err for word in words), printed.err
    if as_json:
        answer = printed.json
        assert answer.keys() == {"schema", "error"}
        assert answer["error"].keys() == {"message", "remedy"}
        assert (
            f"autofit: {answer['error']['message']} {answer['error']['remedy']}".strip()
            == printed.err.strip()
        )
    else:
        assert printed.out == ""
