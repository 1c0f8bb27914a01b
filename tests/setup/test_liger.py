"""What stands for Liger's kernels: the same bytes at every moment of a step as Liger's own functions make."""

import contextlib
import functools
import gc
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autofit.core.errors import RefusedError
from autofit.core.workload import Workload
from autofit.estimate.peak import peak_of
from autofit.estimate.step_trace import Trace
from autofit.estimate.trace import trace
from autofit.hardware.device import detect
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.setup import Setup, liger
from autofit.techniques import kernels
from autofit.training.build import build
from autofit.training.step import train_step
from tests.estimate.traced import AMPERE, peak
from tests.tiny import CPU, LLAMA, gpt2_workload

CARD = replace(AMPERE, here=False)
LIGER, FUSED = {"kernels": "liger"}, {"loss": "fused"}
_WIDER = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}


def of_kind(kind: str, vocabulary: int = 512, length: int = 48, **changes: Any) -> Workload:
    """A language model of two layers of this kind."""
    config = (
        LLAMA
        | _WIDER
        | {"model_type": kind, "vocab_size": vocabulary, "max_position_embeddings": 512}
        | changes
    )
    model = HuggingFaceModel(kind, "causal-lm", config, {"kind": "directory", "path": "tiny"})
    return huggingface_workload(model, sequence_length=length, effective_batch_size=4)


def moments(trace: Trace) -> list[tuple[str, int | None, int, int]]:
    """(phase, block, bytes alive at its start, the most in it) of every stretch of a step."""
    found, sizes = [], dict[int, int]()
    for mark, after in zip(trace.marks, trace.marks[1:], strict=False):
        start = highest = live = sum(sizes.values())
        for event in trace.events[mark.events : after.events]:
            live += event.nbytes - sizes.get(event.storage, 0)
            sizes[event.storage] = event.nbytes
            highest = max(highest, live)
        found.append((mark.phase, mark.block, start, highest))
    return found


@pytest.fixture
def real() -> Iterator[pytest.MonkeyPatch]:
    """Liger itself in the place of its stand-ins, but for the launches of its kernels, until it is undone; as it does
    on a card before Ampere, which of later ones it asks the tensors themselves."""
    pytest.importorskip(
        "liger_kernel", reason="liger-kernel is not installed: pip install -e '.[triton]'"
    )
    interface = importlib.import_module("triton.runtime.jit").KernelInterface
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(interface, "__getitem__", lambda *_: lambda *args, **kwargs: None)
    fused = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    monkeypatch.setattr(fused, "_can_use_mm_out", lambda one, other: liger._same_dtype(one, other))
    # the sum of the losses is divided by their number
    monkeypatch.setattr(torch, "equal", lambda *_: False)

    def apply(setup: Setup) -> None:
        setup.on_close(kernels._Snapshot(setup.model).restore)
        patch = kernels._patch_for(setup.model)
        taken = inspect.signature(patch).parameters
        patch(model=setup.model, **{name: False for name in kernels._LOSSES if name in taken})

    def summed(setup: Setup, slices: Any) -> Any:
        return importlib.import_module(
            "liger_kernel.transformers.functional"
        ).liger_fused_linear_cross_entropy

    monkeypatch.setattr(kernels, "stand_in_for_liger", apply)
    monkeypatch.setattr(liger, "fused_cross_entropy", summed)
    _look_for_backends()
    yield monkeypatch
    monkeypatch.undo()


@functools.cache
def _look_for_backends() -> None:
    """Liger does so when a function is called first, and what it does not find holds on to that call's tensors."""
    trace(of_kind("llama"), LIGER, CARD)


_BESIDE: list[dict[str, Any]] = [
    FUSED,
    {**LIGER, **FUSED, "precision": "bf16"},
    {**LIGER, **FUSED, "precision": "bf16-mixed"},
    {**LIGER, **FUSED, "precision": "bf16", "lora_rank": 4},
    {**LIGER, "precision": "bf16", "activation_checkpointing": "full", "micro_batch_size": 2},
]


@pytest.mark.parametrize("knobs", _BESIDE, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3"])
def test_a_step_holds_what_ligers_own_functions_make(
    kind: str, knobs: dict[str, Any], real: pytest.MonkeyPatch
) -> None:
    theirs = moments(trace(of_kind(kind), knobs, CARD))
    real.undo()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(liger, "_PROCESSORS", 1)
        patched.setattr(liger, "_AMPERE", (99, 0))
        assert moments(trace(of_kind(kind), knobs, CARD)) == theirs


def test_every_kind_of_models_that_liger_has_kernels_for_is_known() -> None:
    pytest.importorskip(
        "liger_kernel", reason="liger-kernel is not installed: pip install -e '.[triton]'"
    )
    theirs = importlib.import_module(
        "liger_kernel.transformers.monkey_patch"
    ).MODEL_TYPE_TO_APPLY_LIGER_FN
    assert {*liger._KINDS, *liger._OTHERS.split()} == set(theirs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Triton and Liger call
@pytest.mark.parametrize("knobs", [*_BESIDE, {**LIGER, **FUSED}], ids=str)
def test_on_a_gpu_a_step_holds_what_is_predicted(knobs: dict[str, Any]) -> None:
    pytest.importorskip(
        "liger_kernel", reason="liger-kernel is not installed: pip install -e '.[triton]'"
    )
    hardware, workload = (
        detect("cuda"),
        of_kind("llama", 8192, hidden_size=256, intermediate_size=1024, length=512),
    )
    peaks = {}
    # the first makes cuBLAS's workspaces
    for name, given in {"warm": {}, "plain": {}, "kernels": knobs}.items():
        given = {"precision": knobs.get("precision", "fp32")} | given
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with contextlib.closing(build(workload, given, hardware)) as setup:
            for _ in range(2):
                train_step(setup, workload.batch(4))
        peaks[name] = (
            torch.cuda.max_memory_allocated() - before,
            peak_of(trace(workload, given, hardware), hardware),
        )
        del setup
        gc.collect()
    for name in ("plain", "kernels"):
        measured, predicted = peaks[name]
        assert predicted.nbytes == pytest.approx(measured, rel=0.03)


def test_less_is_kept_than_by_the_models_own_operations() -> None:
    workload, bf16 = of_kind("llama"), {"precision": "bf16"}
    plain, norms, both = (
        peak(trace(workload, bf16 | knobs, CARD)) for knobs in ({}, LIGER, {**LIGER, **FUSED})
    )
    assert both < norms < plain
    chunked = peak(trace(workload, bf16 | {"loss": "chunked"}, CARD))
    assert peak(trace(workload, bf16 | FUSED, CARD)) != chunked


def test_no_norm_and_no_activation_takes_more_than_one_operator_each_way() -> None:
    step = trace(of_kind("llama"), LIGER | {"precision": "bf16"}, CARD)
    launches = [cost for cost in step.costs if cost.name == "autofit::kernel"]
    # five norms, and of two blocks the activation and the rotation
    assert len(launches) == 2 * (5 + 2 + 2)
    hidden = 4 * 48 * 32 * 2
    # the first norm reads and writes each once
    assert launches[0].sizes == (hidden, 32 * 2, hidden, 4 * 48 * 4)


@pytest.mark.parametrize(
    ("tokens", "features", "vocabulary", "rows"),
    [
        (16384, 4096, 32000, 2048),  # the example in Liger's own source
        (8192, 4096, 128256, 256),
        (100, 4096, 4096, 100),
        (1, 16, 1024, 1),
        (0, 16, 1024, 1),
    ],
)
def test_a_chunks_logits_are_about_as_large_as_all_hidden_states(
    tokens: int, features: int, vocabulary: int, rows: int
) -> None:
    assert liger.chunk_rows(tokens, features, vocabulary) == rows


def test_before_ampere_a_product_stands_beside_the_gradient_it_is_added_to() -> None:
    """As does one in fp32 on any card."""
    knobs = {**FUSED, "precision": "fp16-mixed"}
    later, before = (
        peak(trace(of_kind("llama", 8192), knobs, card))
        for card in (CARD, replace(CARD, capability=(7, 5)))
    )
    assert before > later


def test_a_kind_of_models_that_liger_does_not_know_is_refused_and_another_approximated() -> None:
    with pytest.raises(
        RefusedError, match="liger has no kernels for models of type gpt2; use none"
    ):
        trace(gpt2_workload(), LIGER, CARD)
    found = trace(of_kind("olmo2"), LIGER, CARD)
    assert found.assumptions[0].startswith(
        "liger's kernels were traced as the model's own operations"
    )
    assert peak(found) == peak(trace(of_kind("olmo2"), {}, CARD))


def test_a_head_with_a_bias_gets_its_gradient_too() -> None:
    with contextlib.closing(build(of_kind("llama"), {}, CPU)) as setup:
        summed = liger.fused_cross_entropy(setup, lambda *_: iter([slice(0, 4), slice(4, 8)]))
        hidden, weight, bias = (
            torch.ones(*size, requires_grad=True) for size in ((8, 16), (32, 16), (32,))
        )
        summed(hidden, weight, torch.zeros(8, dtype=torch.int64), bias=bias).backward()
        assert [each.grad.shape for each in (hidden, weight, bias) if each.grad is not None] == [
            (8, 16),
            (32, 16),
            (32,),
        ]
