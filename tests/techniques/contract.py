"""What the shared contract of techniques is tested with, and what each technique's own test file says to it. Those of
several devices keep theirs in training/test_several_ranks.py.

`test_NAME.py` of a knob defines `shows(effect)`, which asserts how a value is seen to take effect. It may define
`NUMBERS` (values that stand for a knob of any number), `beside(value)` (knobs the value means nothing without) and
`OFF` (the knobs of the run it is compared with; `beside(value)` unless given).
"""

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.config import Value
from autofit.core.errors import RefusedError
from autofit.core.workload import Hyperparameters, Workload
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup, Stage, Technique
from autofit.techniques import all_techniques, canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.step import accumulate, update
from tests import tiny

EFFECTIVE_BATCH = 4
# Values that, without Inductor, run what another value of their knob runs: the same graph, cut at another place or not.
ALIKE = {
    ("compile", "max-autotune-no-cudagraphs"),
    ("activation_checkpointing", "budget-0.25"),
    ("activation_checkpointing", "budget-0.75"),
}
WORKLOADS = {
    "llama": tiny.llama_workload(EFFECTIVE_BATCH),
    "plain module": tiny.transformer_workload(EFFECTIVE_BATCH),
}


ON_ONE_DEVICE = [technique for technique in all_techniques() if technique.stage is not Stage.SHARD]


def file_of(name: str) -> Any:
    """The test file of a knob."""
    return importlib.import_module(f"tests.techniques.test_{name}")


def values_of(technique: Technique) -> tuple[Value, ...]:
    """Every value, `off` first."""
    rest = technique.values or file_of(technique.name).NUMBERS
    return (technique.off, *(value for value in rest if value != technique.off))


def knobs(name: str, value: Value) -> dict[str, Value]:
    """The value and what it needs beside it."""
    beside: Callable[[Value], dict[str, Value]] = getattr(file_of(name), "beside", lambda _: {})
    return {**(beside(value) if value != technique_named(name).off else {}), name: value}


def without(name: str, value: Value) -> dict[str, Value]:
    """The knobs of the run that `value` is compared with."""
    given: dict[str, Value] | None = getattr(file_of(name), "OFF", None)
    return given if given is not None else {**knobs(name, value), name: technique_named(name).off}


def reason_against(name: str, value: Value) -> str | None:
    """Why the value is refused on this machine's CPU, whatever the model."""
    workload = WORKLOADS["llama"]
    return refuse(canonicalize(knobs(name, value), workload, tiny.CPU), workload, tiny.CPU)


every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def living(workload: Workload) -> nn.Module:
    """The workload's model with the same real weights every time."""
    torch.manual_seed(0)
    return workload.model()


def built(workload: Workload, config: dict[str, Value], *, lr: float = 1e-3) -> Setup:
    """A run that trains a living model; skips the test where the technique refuses this kind of model."""
    try:
        return build(
            workload,
            config,
            tiny.CPU,
            model=living(workload),
            hyperparameters=Hyperparameters(lr=lr),
        )
    except RefusedError as refused:
        return pytest.skip(str(refused))


@dataclass
class Trace:
    """What one optimizer step did: the operators, the modules that ran, the tracked peak of forward and backward."""

    ops: list[tuple[str, torch.dtype | None]] = field(default_factory=list)
    calls: Counter[nn.Module] = field(default_factory=Counter)
    samples: list[int] = field(default_factory=list)
    loss: float = 0.0
    peak_bytes: int = 0

    def dtypes(self, *names: str) -> set[torch.dtype | None]:
        """Of the results of the operators whose name holds one of these."""
        return {dtype for op, dtype in self.ops if any(name in op for name in names)}

    def ran(self, part: str) -> bool:
        """Whether an operator with that in its name ran."""
        return any(part in op for op, _ in self.ops)


class _Ops(TorchDispatchMode):
    def __init__(self, ops: list[tuple[str, torch.dtype | None]]) -> None:
        super().__init__()
        self.seen = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        self.seen.append((str(func), first.dtype if isinstance(first, torch.Tensor) else None))
        return result


def traced_step(setup: Setup) -> Trace:
    """One optimizer step, watched. Under the watch nothing is compiled: torch runs compiled code plainly then."""
    trace = Trace()
    hooks = [
        module.register_forward_hook(lambda module, args, result: trace.calls.update([module]))
        for module in setup.model.modules()
    ]
    batch = setup.workload.batch(EFFECTIVE_BATCH)

    def count_samples(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        trace.samples.append(len(next(iter(kwargs.values()))))

    hooks.append(setup.model.register_forward_pre_hook(count_samples, with_kwargs=True))
    with StorageTracker() as tracker, _Ops(trace.ops):
        tracker.see([*setup.model.parameters(), *setup.model.buffers()])
        trace.loss = float(accumulate(setup, batch))
        trace.peak_bytes = tracker.peak
        update(setup)
    for hook in hooks:
        hook.remove()
    return trace


@dataclass
class Effect:
    """A value's run (built, not stepped) beside the run of the same config with that knob off."""

    value: Any
    setup: Setup
    off: Setup
    _traces: dict[int, Trace] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """What one step of the value's run does; it runs when this is first asked for."""
        return self._of(self.setup)

    @property
    def off_trace(self) -> Trace:
        """The same of the run with the knob off."""
        return self._of(self.off)

    def _of(self, setup: Setup) -> Trace:
        if id(setup) not in self._traces:
            self._traces[id(setup)] = traced_step(setup)
        return self._traces[id(setup)]


def dtypes_of(parameters: Any) -> set[torch.dtype]:
    return {parameter.dtype for parameter in parameters}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
