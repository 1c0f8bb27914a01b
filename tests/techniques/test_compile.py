"""compile: that code is compiled at all, once for equal blocks, of every kind of model; and what is refused."""

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup
from autofit.setup.layers import repeated_blocks
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.techniques import compile as technique_file
from autofit.training.build import build
from autofit.training.step import accumulate, train_step
from tests import tiny
from tests.techniques.contract import Effect

COMPILED = {"compile": "default"}
CUDA = replace(tiny.CPU, device="cuda", name="a card", capability=(8, 0))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Two runs of one class would share their compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_graphs(setup: Setup) -> int:
    """How many graphs one step compiles; that it breaks nowhere."""
    counters.clear()
    assert accumulate(setup, setup.workload.batch(4)).isfinite()
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


class Stacked(nn.Module):
    """Blocks one after the other, and a classifier."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.LazyLinear(10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.out(features)


class Widening(nn.Module):
    """A block of user code whose output is one feature wider than its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).relu())


def stacked_workload(make: Callable[[], list[nn.Module]]) -> Workload:
    def model() -> nn.Module:
        stacked = Stacked(*make())
        stacked(torch.zeros(1, 48))  # which tells the last layer its width
        return stacked

    batch = tiny.mlp_workload().batch
    return Workload(model=model, batch=batch, loss=tiny.classify, effective_batch_size=4)


def encoder_layers() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(48, 2, 96, dropout=0.0, batch_first=True) for _ in range(4)]


@pytest.mark.parametrize(
    ("workload", "graphs"),
    [
        (tiny.llama_workload(4, num_hidden_layers=3), 1),
        (stacked_workload(encoder_layers), 2),  # what enters the first needs no gradient
    ],
    ids=["llama", "torch's own layers"],
)
def test_equal_blocks_share_one_graph(workload: Workload, graphs: int) -> None:
    """Other models show it where they are compared with plain code, in test_exactness.py."""
    setup = build(workload, COMPILED, tiny.CPU)
    assert len(repeated_blocks(setup.model)) >= 2
    assert compiled_graphs(setup) == graphs
    assert compiled_graphs(setup) == 0
    setup.close()


def test_more_kinds_of_blocks_than_torch_has_patience_for() -> None:
    """After as many graphs of the same code (8, here 2) torch.compile silently runs plain code."""
    workload = stacked_workload(lambda: [Widening(48 + each) for each in range(4)])
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        setup = build(workload, COMPILED, tiny.CPU)
        assert compiled_graphs(setup) == 4
        setup.close()
        assert torch._dynamo.config.recompile_limit == 2


def test_a_model_without_blocks_is_compiled_whole() -> None:
    batch = tiny.mlp_workload().batch
    workload = Workload(
        model=lambda: nn.Sequential(nn.Linear(48, 10), nn.ReLU()),
        batch=batch,
        loss=tiny.classify,
        effective_batch_size=4,
    )
    setup = build(workload, COMPILED, tiny.CPU)
    assert compiled_graphs(setup) == 1


def test_adapters_in_quantised_blocks_are_compiled_with_them() -> None:
    config = {**COMPILED, "lora_rank": 4, "lora_targets": "attention", "quantization": "nf4"}
    setup = build(tiny.llama_workload(4, num_hidden_layers=3), config, tiny.CPU)
    assert compiled_graphs(setup) == 2  # with and without a gradient to what enters
    setup.close()


def test_every_forward_comes_back() -> None:
    model = tiny.Transformer()
    theirs = model.blocks[0].forward = lambda x, inner=model.blocks[0].forward: inner(x) * 2
    setup = build(tiny.transformer_workload(), COMPILED, tiny.CPU, model=model)
    assert all(block.forward is not theirs for block in model.blocks)
    setup.close()
    assert model.blocks[0].forward is theirs
    assert all("forward" not in block.__dict__ for block in model.blocks[1:])
    counters.clear()
    model(**tiny.transformer_workload().batch(4))
    assert not counters["stats"]


@pytest.mark.parametrize("knobs", [{}, {"micro_batch_size": 2}], ids=["whole", "accumulated"])
def test_running_statistics_are_counted_as_ever(knobs: dict[str, int]) -> None:
    def buffers(**compiler: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = tiny.ConvNet()
        setup = build(tiny.conv_workload(4), {**knobs, **compiler}, tiny.CPU, model=model)
        train_step(setup, setup.workload.batch(4))
        setup.close()
        return dict(model.named_buffers())

    torch.testing.assert_close(buffers(compile="default"), buffers())


def test_gradients_are_ready_when_a_hook_of_their_parameter_is_called() -> None:
    """What steps in the backward relies on it."""
    setup = build(tiny.transformer_workload(), COMPILED, tiny.CPU)
    called: list[str] = []
    for name, parameter in setup.trainable():
        parameter.register_post_accumulate_grad_hook(
            lambda each, name=name: called.append(name) if each.grad is not None else None
        )
    accumulate(setup, setup.workload.batch(4))
    assert sorted(called) == sorted(name for name, _ in setup.trainable())
    setup.close()


def failing(error: Exception) -> Callable[..., Any]:
    def backend(*_: Any) -> Any:
        raise error

    return backend


def test_what_the_compiler_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        technique_file, "BACKEND", failing(NotImplementedError("no such kernel\nand more"))
    )
    setup = build(tiny.transformer_workload(), COMPILED, tiny.CPU)
    message = r"the compiler failed on this model \(NotImplementedError: no such kernel\)\. Use compile none\."
    with pytest.raises(RefusedError, match=message) as refused:
        accumulate(setup, setup.workload.batch(4))
    assert isinstance(refused.value.__cause__, BackendCompilerFailed)
    setup.close()


def test_but_want_of_memory_in_it_stays_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique_file, "BACKEND", failing(torch.OutOfMemoryError("too much")))
    setup = build(tiny.transformer_workload(), COMPILED, tiny.CPU)
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        accumulate(setup, setup.workload.batch(4))
    setup.close()


def reason(hardware: Hardware = tiny.CPU) -> str | None:
    workload = tiny.transformer_workload()
    return refuse(canonicalize(COMPILED, workload, hardware), workload, hardware)


def test_on_a_cpu_it_is_not_searched_and_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert technique_named("compile").choices(tiny.CPU) == ("none",)
    assert technique_named("compile").choices(CUDA) == (
        "none",
        "default",
        "max-autotune-no-cudagraphs",
    )
    monkeypatch.setattr(technique_file, "BACKEND", "inductor")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert reason() == (
        "compile: Inductor needs a C++ compiler, and there is no no-such-compiler; install it or name another in CXX, "
        "or use none."
    )


def test_what_cuda_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"triton": True, "gcc": True}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name) or None)
    monkeypatch.setattr(shutil, "which", lambda name: "/there" if found.get(name) else None)
    assert reason(CUDA) is None
    assert "needs compute capability 7.0, a card has 6.1; use none" in (
        reason(replace(CUDA, capability=(6, 1))) or ""
    )
    found["gcc"] = False
    assert "Triton needs a C compiler" in (reason(CUDA) or "")
    found["triton"] = False
    assert "needs Triton, which is not installed; pip install triton, or use none" in (
        reason(CUDA) or ""
    )


def test_and_both_need_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique_file, "BACKEND", "inductor")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
    assert "needs Python's own header Python.h; install python3-dev, or use none" in (
        reason() or ""
    )


def test_only_values_that_compile_say_so() -> None:
    technique = technique_named("compile")
    assert [technique.compiles(value) for value in technique.values] == [False, True, True]
    assert not technique_named("attention").compiles("eager")


@pytest.mark.slow
@pytest.mark.parametrize("value", ["default", "max-autotune-no-cudagraphs"])
def test_inductor_trains_as_plain_code_does(value: str) -> None:
    def losses(**compiler: str) -> torch.Tensor:
        torch.manual_seed(0)
        workload = tiny.transformer_workload(4)
        setup = build(workload, compiler, tiny.CPU, model=tiny.Transformer())
        seen = torch.stack([train_step(setup, workload.batch(4)) for _ in range(3)])
        setup.close()
        return seen

    counters.clear()
    torch.testing.assert_close(losses(compile=value), losses(), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert (
        counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"] >= 1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["default", "max-autotune-no-cudagraphs"])
def test_on_a_gpu_blocks_run_as_generated_kernels(value: str) -> None:
    workload = tiny.transformer_workload(4)
    setup = build(workload, {"compile": value}, replace(tiny.CPU, device="cuda"))
    first = float(train_step(setup, workload.batch(4)))
    with torch.profiler.profile(acc_events=True) as seen:
        last = float(train_step(setup, workload.batch(4)))
    assert any("triton" in event.key for event in seen.key_averages())
    assert last < first
    setup.close()


def shows(effect: Effect) -> None:
    """The blocks' operators were captured, once for all of them; with the knob off, none."""
    assert compiled_graphs(effect.setup) == 1
    assert counters["stats"]["calls_captured"] >= 20
    torch._dynamo.reset()
    assert compiled_graphs(effect.off) == 0
