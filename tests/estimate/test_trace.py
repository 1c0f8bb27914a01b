from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from autofit.core.errors import InputError, RefusedError, UntraceableError
from autofit.core.workload import Workload
from autofit.estimate.figures import predict_all
from autofit.estimate.recorder import Recorder
from autofit.estimate.shallow_model import Cut
from autofit.estimate.skeleton import Skeleton
from autofit.estimate.skeleton_trace import trace_skeleton
from autofit.estimate.trace import trace
from autofit.hardware.tracker import StorageTracker
from autofit.techniques import canonicalize
from autofit.training.build import build
from tests.estimate.traced import AMPERE, allocated, labelled, peak, traced, tracked
from tests.tiny import CPU, llama_workload, mlp_workload, transformer_workload

STEPS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16", "activation_checkpointing": "full", "optimizer": "adamw-foreach"},
    {"precision": "bf16-mixed", "activation_checkpointing": "alternate", "loss": "chunked"},
    {"precision": "bf16-mixed", "lora_rank": 4, "attention": "eager", "optimizer": "sgd"},
    {"activation_checkpointing": "selective", "optimizer": "adafactor"},
    {
        "lora_rank": 4,
        "quantization": "nf4",
        "precision": "bf16",
        "activation_checkpointing": "full",
    },
    {"optimizer_in_backward": True, "attention": "eager"},
]


@pytest.mark.parametrize(
    "knobs", STEPS, ids=lambda knobs: "-".join(map(str, knobs.values())) or "plain"
)
def test_the_traced_peak_is_that_of_a_probe(knobs: dict[str, Any]) -> None:
    workload = llama_workload(effective_batch_size=2)
    assert peak(traced(workload, **knobs)) == tracked(workload, knobs)


class Convolutions(nn.Module):
    """Two convolutions beside a shortcut: scratch memory in kernels, and a gradient that is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.stem(x)
        return (out + self.conv(out.relu())).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_neither_a_prediction_nor_a_probe_counts_scratch_memory_in_kernels(precision: str) -> None:
    workload = Workload(Convolutions, lambda n: torch.ones(n, 3, 20, 20), effective_batch_size=4)
    knobs = {"precision": precision, "optimizer": "sgd"}
    assert peak(traced(workload, **knobs)) == tracked(workload, knobs) < allocated(workload, knobs)


def test_a_network_written_by_hand_is_traced_to_the_byte() -> None:
    workload = transformer_workload()
    assert peak(traced(workload)) == tracked(workload, {})


def test_gradients_of_earlier_micro_batches_are_there_where_they_accumulate() -> None:
    workload = llama_workload(effective_batch_size=4)
    whole, cut = traced(workload), traced(workload, micro_batch_size=2)
    assert labelled(whole, "gradients") > 0
    forward = next(mark.events for mark in cut.marks if mark.phase == "forward")
    alive = {event.storage for event in cut.events[:forward] if event.nbytes}
    before = [storage for storage in alive if cut.labels.get(storage) == "gradients"]
    assert len(before) == len(cut.shapes)


class Tokens(nn.Module):
    """Two learnt tokens before those of its input, as in image classifiers; a third one alone in its own sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(1, 1, 64)) for _ in range(2))
        self.other = nn.Parameter(torch.zeros(1, 1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (each.expand(len(x), -1, -1) for each in (self.first, self.second))
        other = torch.cat([self.other.expand(len(x), -1, -1), x.exp()], dim=1)
        return torch.cat([*tokens, x], dim=1).sin().sum() + other.sin().sum()


@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_that_are_views_keep_what_they_are_views_of(samples: int) -> None:
    workload = Workload(
        model=Tokens,
        batch=lambda n: {"x": torch.randn(n, 40, 64)},
        loss=lambda model, batch: model(**batch),
        effective_batch_size=4,
    )
    knobs = {"precision": "fp32", "micro_batch_size": samples, "optimizer": "sgd"}
    # some numbers
    assert peak(traced(workload, **knobs)) == pytest.approx(tracked(workload, knobs), abs=64)


def test_a_step_is_marked_phase_by_phase_and_block_by_block() -> None:
    marks = traced(llama_workload(num_hidden_layers=3)).marks
    blocks = [(mark.phase, mark.block) for mark in marks if mark.block is not None]
    assert blocks == [
        ("forward", 0),
        ("forward", 1),
        ("forward", 2),
        ("backward", 2),
        ("backward", 1),
        ("backward", 0),
    ]
    assert list(dict.fromkeys(mark.phase for mark in marks)) == [
        *("build", "state", "forward", "backward", "update", "end")
    ]


def test_state_is_labelled_by_what_it_is_of() -> None:
    trace = traced(llama_workload())
    numbers = sum(shape.numel() for shape, _, _ in trace.shapes)
    assert labelled(trace, "parameters") >= 4 * numbers
    assert 8 * numbers <= labelled(trace, "optimizer") <= 8 * numbers + 8 * len(trace.shapes)


def test_the_world_is_put_back() -> None:
    from torch.nn import functional
    from transformers import masking_utils

    before = (
        functional.scaled_dot_product_attention,
        masking_utils.is_tracing,
        nn.Module.register_parameter,
    )
    traced(llama_workload(), AMPERE, precision="bf16")
    assert before == (
        functional.scaled_dot_product_attention,
        masking_utils.is_tracing,
        nn.Module.register_parameter,
    )
    assert type(torch.ones(1)) is torch.Tensor


def test_what_a_config_is_refused_for_is_told() -> None:
    with pytest.raises(RefusedError, match="quantised weights cannot be trained"):
        trace(llama_workload(), {"quantization": "nf4"}, CPU)
    with pytest.raises(InputError, match="unknown knob"):
        trace(llama_workload(), {"precisoin": "fp32"}, CPU)


class Reads(nn.Module):
    """Its forward looks at what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out.mean() if out.sum().item() > 0 else out.sum()


class Counts(nn.Module):
    """Its forward looks at its inputs only, which are known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)[:, : int(lengths.max())]
        return out.mean()


class Selects(nn.Module):
    """How much it computes depends on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out.mean() * len(out.unique())


def test_a_forward_that_reads_a_number_cannot_be_traced_and_says_which_operator() -> None:
    workload = Workload(Reads, lambda n: torch.ones(n, 4), effective_batch_size=2)
    with pytest.raises(
        UntraceableError,
        match=r"reads a number that depends on its weights \(at .*test_trace\.py:\d+\)",
    ):
        traced(workload)
    with pytest.raises(UntraceableError, match="unique"):
        traced(replace(workload, model=Selects))


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), GeneratorExit("no"), ValueError("x" * 10**6)],
    ids=["exit", "end", "much"],
)
def test_whatever_else_a_forward_raises_is_told_in_few_words(error: BaseException) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise error

    with pytest.raises(UntraceableError, match=type(error).__name__) as caught:
        traced(replace(mlp_workload(), loss=loss))
    assert len(str(caught.value)) < 800


def test_a_forward_may_read_what_its_inputs_say() -> None:
    workload = Workload(
        Counts,
        lambda n: {"x": torch.ones(n, 4), "lengths": torch.tensor([3] * n)},
        effective_batch_size=2,
    )
    assert peak(traced(workload)) > 0


def test_a_factory_that_insists_on_real_weights_is_traced_too() -> None:
    def real() -> nn.Module:
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(layer.weight.detach().cpu().numpy()))
        return layer

    workload = Workload(
        real, lambda n: torch.ones(n, 8), lambda model, x: model(x).mean(), effective_batch_size=2
    )
    assert labelled(traced(workload), "parameters") == 4 * (64 + 8)


def test_a_model_cut_short_stands_for_the_whole() -> None:
    workload = llama_workload(num_hidden_layers=9)
    short = Skeleton.cut_short(workload, CPU, Cut())
    assert short.depth is not None
    assert (short.depth.whole, short.depth.retained) == (9, 3)
    shallow = trace_skeleton(workload, {}, CPU, short)
    assert len(set(shallow.owners.values())) == 3


class HoldsTable(nn.Module):
    """Keeps positions beside its parameters and buffers, as VideoMAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(16, 16), torch.ones(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).unsqueeze(1) + self.table).mean()


def test_tensors_beside_parameters_and_buffers_count_as_in_a_probe() -> None:
    workload = Workload(HoldsTable, lambda n: torch.ones(n, 16), effective_batch_size=2)
    assert peak(traced(workload)) == tracked(workload, {})


class MakesTable(nn.Module):
    """Needs more memory to be made than to be trained, as a small model with a mask of its longest sequence does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer(
            "mask", torch.ones(64, 64).tril().expand(4, 64, 64).clone()[0, :16, :16].clone()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) @ self.mask).mean()


def test_what_a_factory_needs_to_make_a_model_counts_on_the_cpu() -> None:
    workload = Workload(MakesTable, lambda n: torch.ones(n, 16), effective_batch_size=2)
    config = canonicalize({}, workload, CPU)
    assert peak(traced(workload)) == tracked(workload, {}) >= 5 * 64 * 64 * 4
    assert predict_all(workload, CPU, [config], measuring=0)[0] == [tracked(workload, {})]
    assert peak(traced(workload, AMPERE)) < 64 * 64 * 4  # a host makes it


class LargeLast(nn.Module):
    """Its largest layer is quantised beside the statistics of what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 256), nn.Linear(256, 256)
        self.norm, self.head = nn.BatchNorm1d(256), nn.Linear(256, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.two(self.one(x)))).mean()
        return out


def test_buffers_are_there_while_weights_are_quantised() -> None:
    workload = Workload(LargeLast, lambda n: torch.randn(n, 8), effective_batch_size=2)
    knobs = {"lora_rank": 1, "quantization": "nf4"}
    prediction = traced(workload, **knobs)
    with StorageTracker() as tracker:
        build(workload, knobs, CPU).close()
    assert (
        peak(replace(prediction, events=prediction.events[: prediction.start("state")]))
        == tracker.peak
    )


class Branches(nn.Module):
    """Of three branches one is used, one frozen, and one waits for inputs of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.reference = (
            nn.Linear(16, 16),
            nn.Linear(16, 64),
            nn.Linear(16, 16),
        )
        self.reference.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.used(x) - self.reference(x)).square().mean()


@pytest.mark.parametrize(
    "knobs", [{}, {"micro_batch_size": 1}, {"optimizer_in_backward": True}, {"optimizer": "sgd"}]
)
def test_weights_that_no_backward_reaches_have_neither_gradients_nor_state(
    knobs: dict[str, Any],
) -> None:
    workload = Workload(Branches, lambda n: torch.ones(n, 16), effective_batch_size=2)
    traces = traced(workload, **knobs)
    assert peak(traces) == pytest.approx(tracked(workload, knobs), rel=0.001)
    assert [shape for shape, _, _ in traces.shapes] == [(16, 16), (16,)]
    config = canonicalize(knobs, workload, CPU)
    (nbytes,), _ = predict_all(workload, CPU, [config], measuring=0)
    assert nbytes == pytest.approx(tracked(workload, knobs), rel=0.01)


def test_the_record_is_gone_through_once_for_all_weights_that_no_backward_reaches() -> None:
    with mock.patch.object(
        Recorder, "resize", autospec=True, side_effect=Recorder.resize
    ) as resized:
        traced(Workload(Branches, lambda n: torch.ones(n, 16), effective_batch_size=2))
    (_, sizes), *others = (call.args for call in resized.call_args_list)
    assert len(sizes) >= 4 and not others  # a weight and a bias, each with its state
