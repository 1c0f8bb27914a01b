"""optimizer_offload: what is refused, and torchao's own offloading held against plain AdamW.

On a CPU torchao's class runs as it is, with streams that do at once what they are told and memory that is not pinned;
the host's copies are other tensors than the weights there too. What only a GPU shows is marked `gpu`.
"""

import contextlib
import dataclasses
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import InputError, RefusedError
from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Hyperparameters, Traits, Workload
from autofit.hardware.device import detect
from autofit.setup import Setup, requirements
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.loop import train
from autofit.training.step import accumulate, train_step, update
from tests import tiny
from tests.late_lane import LateLane
from tests.streaming import trained_on_card
from tests.techniques.contract import Effect

OFFLOAD = technique_named("optimizer_offload")
CARD = dataclasses.replace(
    tiny.CPU, device="cuda", name="a card", memory_bytes=24 * GIB, capability=(8, 0)
)


class Stream:
    """A stream whose work is done when it is given."""

    waited = 0

    def wait_stream(self, other: "Stream") -> None:
        Stream.waited += 1

    def record_event(self) -> "Stream":
        return self

    def synchronize(self) -> None: ...


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's CPUOffloadOptimizer takes the CPU for a device with streams."""
    empty_like = torch.empty_like
    monkeypatch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, pin_memory=False, **rest: empty_like(*args, **rest)
    )


def run(*, offload: bool | str, workload: Workload | None = None, **chosen: Any) -> Setup:
    """A run on the CPU from the same weights every time, offloaded past `refuse`, which forbids it there."""
    torch.manual_seed(0)
    workload = workload or tiny.llama_workload(tie_word_embeddings=True)
    hyperparameters = Hyperparameters(**{"lr": 1e-2, "weight_decay": 0.3, **chosen})
    knobs = {"micro_batch_size": 2}
    setup = build(
        workload, knobs, tiny.CPU, model=workload.model(), hyperparameters=hyperparameters
    )
    if offload:
        OFFLOAD.apply(setup, "cpu" if offload is True else offload)
    return setup


def assert_same_weights(one: Setup, other: Setup) -> None:
    for (name, left), (_, right) in zip(one.trainable(), other.trainable(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7, msg=name)


# torchao's class behind the front.


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_it_trains_as_plain_adamw_does(max_grad_norm: float | None) -> None:
    """Over accumulated gradients, tied weights, changing rates, decay on matrices alone, and with clipped gradients."""
    chosen = {"max_grad_norm": max_grad_norm, "schedule": "cosine", "warmup_steps": 1}
    plain, offloaded = (run(offload=each, **chosen) for each in (False, True))
    batches = [plain.workload.batch(4)] * 4
    losses = [
        [report.loss for report in train(setup, batches, steps=4)] for setup in (plain, offloaded)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same_weights(plain, offloaded)


@pytest.mark.usefixtures("streams")
def test_large_weights_are_stepped_on_the_host_and_small_ones_where_they_are() -> None:
    setup = run(offload=True)
    train_step(setup, setup.workload.batch(4))
    inner = setup.optimizer._inner
    large = {weight for _, weight in setup.trainable() if weight.numel() >= 4096}
    assert large == inner.param_d2h_map.keys()
    assert len(large) == 6  # of two layers, the MLP's three
    for weight in large:
        host = inner.param_d2h_map[weight]
        assert host is not weight
        assert torch.equal(host, weight)
        assert inner.optim_dict[weight].state[host]["exp_avg"].shape == weight.shape
        assert inner.optim_dict[weight].defaults["fused"]


@pytest.mark.usefixtures("streams")
def test_the_host_steps_some_blocks_and_the_device_the_rest(tmp_path: Path) -> None:
    plain, offloaded = run(offload=False), run(offload="cpu:1")
    first = set(repeated_blocks(offloaded.model)[0].parameters())
    inner = offloaded.optimizer._inner
    assert inner.param_d2h_map.keys() == {each for each in first if each.numel() >= 4096}
    on_device = {weight for group in inner.d_opt.param_groups for weight in group["params"]}
    trained = {weight for _, weight in offloaded.trainable()}
    assert on_device | inner.param_d2h_map.keys() == trained
    assert not on_device & inner.param_d2h_map.keys()

    for setup in (plain, offloaded):
        for _ in range(2):
            train_step(setup, setup.workload.batch(4))
    assert_same_weights(plain, offloaded)

    # Decay is of matrices alone, also of those that the device steps; and all goes on as it was.
    assert {
        (p.dim() >= 2, g["weight_decay"]) for g in inner.d_opt.param_groups for p in g["params"]
    } == {
        (True, 0.3),
        (False, 0.0),
    }
    checkpoint.save(offloaded, tmp_path, 2)
    train_step(offloaded, offloaded.workload.batch(4))
    again = run(offload="cpu:1")
    train_step(again, again.workload.batch(4))
    assert checkpoint.load(again, tmp_path).next_step == 2
    train_step(again, again.workload.batch(4))
    assert_same_weights(offloaded, again)


@pytest.mark.usefixtures("streams")
def test_blocks_without_trained_weights_have_nothing_to_step() -> None:
    workload = tiny.llama_workload()
    torch.manual_seed(0)
    model = workload.model()
    for weight in repeated_blocks(model)[0].parameters():
        weight.requires_grad_(False)
    setup = build(workload, {"micro_batch_size": 2}, tiny.CPU, model=model)
    with pytest.raises(RefusedError, match="these blocks have no trained weights; use none"):
        OFFLOAD.apply(setup, "cpu:1")


@pytest.mark.usefixtures("streams")
def test_the_front_shows_the_devices_weights_with_their_groups_and_state() -> None:
    setup = run(offload=True)
    groups, trainable = setup.optimizer.param_groups, [weight for _, weight in setup.trainable()]
    assert isinstance(setup.optimizer, torch.optim.Optimizer)
    assert Counter(id(p) for group in groups for p in group["params"]) == Counter(
        map(id, trainable)
    )
    assert {(p.dim() >= 2, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (True, 0.3),
        (False, 0.0),
    }
    assert not setup.optimizer.state
    for number in (1, 2):
        train_step(setup, setup.workload.batch(4))
        assert setup.optimizer.state.keys() == set(trainable)
        assert {int(state["step"]) for state in setup.optimizer.state.values()} == {number}
        assert all(weight.grad is None for weight in trainable)


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("group", [0, 1])
def test_each_group_has_its_own_learning_rate(group: int) -> None:
    setup = run(offload=True)
    before = {name: weight.detach().clone() for name, weight in setup.trainable()}
    for index, each in enumerate(setup.optimizer.param_groups):
        each["lr"] = 1e-2 if index == group else 0.0
    train_step(setup, setup.workload.batch(4))
    for name, weight in setup.trainable():
        assert torch.equal(weight, before[name]) == ((weight.dim() >= 2) == (group == 1)), name


@pytest.mark.usefixtures("streams")
def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(tmp_path: Path) -> None:
    """The weights of the host too, and with the learning rates that are set after loading."""
    first = run(offload=True)
    batch = first.workload.batch(4)
    for _ in range(2):
        train_step(first, batch)
    checkpoint.save(first, tmp_path, 2)
    second = run(offload=True)
    accumulate(second, first.workload.batch(3))  # gradients wait on the host that belong to no step
    assert checkpoint.load(second, tmp_path).next_step == 2
    assert all(
        torch.equal(host, device) for device, host in second.optimizer._inner.param_d2h_map.items()
    )
    second.optimizer.zero_grad()
    second.optimizer.step()
    assert_same_weights(first, second)
    for lr in (3e-3, 0.0, 1e-3):
        for setup in (first, second):
            for group in setup.optimizer.param_groups:
                group["lr"] = lr
        assert train_step(first, batch) == train_step(second, batch)
    assert_same_weights(first, second)


@pytest.mark.usefixtures("streams")
def test_a_checkpoint_of_the_plain_optimizer_is_refused(tmp_path: Path) -> None:
    setup = run(offload=True)
    setup.config = setup.config.replace(optimizer_offload="cpu")
    checkpoint.save(setup, tmp_path, 1)
    with pytest.raises(InputError, match="is of another model or config"):
        checkpoint.load(run(offload=False), tmp_path)


@pytest.mark.usefixtures("streams")
def test_a_batch_without_a_valid_label_changes_nothing() -> None:
    setup = run(offload=True)
    before = {name: weight.detach().clone() for name, weight in setup.trainable()}
    accumulate(setup, {**setup.workload.batch(4), "labels": torch.full((4, 16), -100)})
    assert not update(setup)
    assert all(torch.equal(weight, before[name]) for name, weight in setup.trainable())


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_each_gradient_is_copied_once_a_step_whatever_the_micro_batches(
    max_grad_norm: float | None,
) -> None:
    setup = run(offload=True, max_grad_norm=max_grad_norm)
    weights = len(setup.optimizer._inner.param_d2h_map)
    Stream.waited = 0  # once for each copy
    batch = setup.workload.batch(4)
    accumulate(setup, batch)  # two micro-batches
    assert Stream.waited == 0
    update(setup)
    assert Stream.waited == weights == 6


@pytest.mark.usefixtures("streams")
def test_closing_removes_torchaos_hooks_and_no_others() -> None:
    setup = run(offload=True)
    weight = next(weight for _, weight in setup.trainable() if weight.numel() >= 4096)
    calls: list[nn.Parameter] = []
    weight.register_post_accumulate_grad_hook(calls.append)
    train_step(setup, setup.workload.batch(4))
    setup.close()
    Stream.waited = 0
    accumulate(setup, setup.workload.batch(4))
    assert len(calls) == 4  # of two micro-batches in two steps
    assert Stream.waited == 0
    assert [len(each._post_accumulate_grad_hooks or ()) for _, each in setup.trainable()].count(
        1
    ) == 1


@pytest.mark.usefixtures("streams")
def test_a_model_of_small_weights_only_and_one_of_large_ones_only() -> None:
    for width, on_host in ((16, 0), (64, 2)):
        workload = Workload(
            model=lambda width=width: nn.Sequential(
                *(nn.Linear(width, width, bias=False) for _ in range(2))
            ),
            batch=lambda n, width=width: torch.ones(n, width),
            loss=lambda model, batch: model(batch).square().mean(),
            effective_batch_size=2,
        )
        plain, offloaded = (run(offload=each, workload=workload) for each in (False, True))
        assert len(offloaded.optimizer._inner.param_d2h_map) == on_host
        for _ in range(2):
            train_step(plain, workload.batch(2))
            train_step(offloaded, workload.batch(2))
        offloaded.optimizer.load_state_dict(offloaded.optimizer.state_dict())
        assert_same_weights(plain, offloaded)


# Beside weights that rest on the host, too.

AT_REST = {"parameter_offload": "cpu", "optimizer_offload": "cpu", "micro_batch_size": 2}
BLOCKS = 5


@pytest.fixture
def resting(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are streamed here, too, by copies that come as late as they may."""
    for name in ("parameter_offload", "optimizer_offload"):
        monkeypatch.setattr(technique_named(name), "refuse", lambda *_: None)
    monkeypatch.setattr(CopyLane, "of", lambda device: LateLane())


def stacked(width: int = 384, *, ends: bool = True) -> Workload:
    """Blocks of two matrices of 1.1 MiB, with a layer before and after them or without."""

    def model() -> nn.Module:
        blocks = tiny.MLP(width, BLOCKS)
        return blocks if ends else Bare(blocks)

    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(count)
        return torch.randn(count, width, generator=generator), torch.randint(
            10, (count,), generator=generator
        )

    usual = tiny.mlp_workload(4)
    return dataclasses.replace(
        usual, model=model, batch=batch, loss=usual.loss if ends else loss_of_bare
    )


class Bare(nn.Module):
    """The matrices of blocks and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(each.in_features, each.out_features, bias=False) for each in layers)
            )
            for block in repeated_blocks(model)
            if (layers := [each for each in block.modules() if isinstance(each, nn.Linear)])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def loss_of_bare(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - 1).square().mean()


def rested(config: dict[str, Any], workload: Workload, **chosen: Any) -> Setup:
    torch.manual_seed(0)
    hyperparameters = Hyperparameters(**{"lr": 1e-3, "weight_decay": 0.3, **chosen})
    return build(
        workload, config, tiny.CPU, model=workload.model(), hyperparameters=hyperparameters
    )


@pytest.mark.usefixtures("resting")
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"micro_batch_size": 4},
        {"micro_batch_size": 1, "activation_checkpointing": "full"},
        {"precision": "bf16"},
        {"precision": "bf16-mixed", "activation_checkpointing": "alternate"},
    ],
    ids=str,
)
def test_weights_that_rest_are_stepped_where_they_are(knobs: dict[str, Any]) -> None:
    workload, chosen = stacked(), {"schedule": "cosine", "warmup_steps": 1}
    plain = rested({"micro_batch_size": 2, "optimizer": "adamw", **knobs}, workload, **chosen)
    setup = rested({**AT_REST, **knobs}, workload, **chosen)
    batches = [workload.batch(4)] * 4
    losses = [[report.loss for report in train(each, batches, steps=4)] for each in (plain, setup)]
    assert losses[0] == losses[1]
    at_rest = setup.host_params()
    assert len(at_rest) == 2 * BLOCKS
    assert all(each.grad is None for each in at_rest.values())
    assert {weight.untyped_storage().nbytes() for weight in at_rest} == {0}
    for (name, one), (_, other) in zip(plain.trainable(), setup.trained_values(), strict=True):
        assert torch.equal(one, other), name
    states = setup.optimizer.state
    assert states.keys() == {weight for _, weight in setup.trainable()}
    assert all(
        torch.equal(states[b]["exp_avg"], plain.optimizer.state[a]["exp_avg"])
        for (_, a), (_, b) in both(plain, setup)
    )


def both(one: Setup, other: Setup) -> Any:
    return zip(one.trainable(), other.trainable(), strict=True)


@pytest.mark.usefixtures("resting")
def test_gradients_of_both_memories_are_clipped_together() -> None:
    workload = stacked()
    plain, setup = (
        rested(each, workload, max_grad_norm=0.01) for each in ({"micro_batch_size": 2}, AT_REST)
    )
    for _ in range(3):
        losses = [train_step(each, workload.batch(4)) for each in (plain, setup)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(plain.progress.gradient_norm, setup.progress.gradient_norm)
    for (name, one), (_, other) in zip(plain.trainable(), setup.trained_values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.usefixtures("resting")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks_of_weights_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = technique_named("compile")
    monkeypatch.setattr(f"{type(compiling).__module__}.BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "refuse", lambda *_: None)
    workload = stacked()
    plain = rested({"micro_batch_size": 2, "optimizer": "adamw"}, workload)
    setup = rested({**AT_REST, "compile": "default"}, workload)
    for _ in range(3):
        torch.testing.assert_close(
            train_step(plain, workload.batch(4)), train_step(setup, workload.batch(4))
        )
    setup.close()
    for (name, one), (_, other) in zip(plain.trainable(), setup.trained_values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.usefixtures("resting")
def test_a_model_of_blocks_alone() -> None:
    workload = stacked(ends=False)
    plain, setup = (
        rested(each, workload) for each in ({"micro_batch_size": 2, "optimizer": "adamw"}, AT_REST)
    )
    for _ in range(3):
        assert torch.equal(
            train_step(plain, workload.batch(4)), train_step(setup, workload.batch(4))
        )
    assert len(setup.host_params()) == len(setup.trainable()) == 2 * BLOCKS
    setup.close()
    assert_same_weights(plain, setup)


@pytest.mark.usefixtures("resting")
def test_a_stopped_run_of_weights_at_rest_goes_on_as_if_it_never_was(tmp_path: Path) -> None:
    workload = stacked()
    first = rested(AT_REST, workload)
    for _ in range(2):
        train_step(first, workload.batch(4))
    checkpoint.save(first, tmp_path, 2)
    second = rested({**AT_REST, "micro_batch_size": 1}, workload)  # another split learns the same
    train_step(second, workload.batch(2))
    assert checkpoint.load(second, tmp_path).next_step == 2
    for _ in range(2):
        torch.testing.assert_close(
            train_step(first, workload.batch(4)), train_step(second, workload.batch(4))
        )
    for (name, one), (_, other) in zip(
        first.trained_values(), second.trained_values(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=name)
    with pytest.raises(InputError, match="parameter_offload none, checkpoint has cpu"):
        checkpoint.load(rested({**AT_REST, "parameter_offload": "none"}, workload), tmp_path)
    other_end = rested({**AT_REST, "parameter_offload": "none"}, workload)
    checkpoint.save(other_end, tmp_path / "other", 1)
    with pytest.raises(InputError, match="parameter_offload cpu, checkpoint has none"):
        checkpoint.load(second, tmp_path / "other")


# What is refused.


def reason(hardware: Hardware, **knobs: Any) -> str | None:
    workload = tiny.llama_workload()
    return refuse(
        canonicalize({"optimizer_offload": "cpu", **knobs}, workload, hardware), workload, hardware
    )


def test_on_a_cpu_there_is_nothing_to_offload_to() -> None:
    assert OFFLOAD.choices(tiny.CPU) == ("none",)
    assert reason(tiny.CPU) == (
        "optimizer_offload: on a CPU the state is in the host's memory already, so there is nothing to offload; "
        "use none."
    )


def test_on_a_gpu_it_is_offered_with_what_it_can_hold() -> None:
    assert OFFLOAD.choices(CARD) == ("none", "cpu")
    assert OFFLOAD.package("cpu") == "torchao"
    for knobs in ({}, {"lora_rank": 8}, {"micro_batch_size": 1}, {"precision": "bf16-mixed"}):
        assert reason(CARD, **knobs) is None


@pytest.mark.parametrize(
    "optimizer", [v for v in technique_named("optimizer").values if v != "adamw"]
)
def test_the_state_of_another_optimizer_is_refused(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "no_compiler", lambda *_: None)
    card = dataclasses.replace(CARD, capability=(9, 0))
    precision = "bf16" if optimizer in ("adamw-master", "adamw-sr", "adamw-8bit-sr") else "fp32"
    assert reason(card, optimizer=optimizer, precision=precision) == (
        f"optimizer_offload: the step on the host is that of adamw, not of {optimizer}; use optimizer adamw."
    )


def test_a_loss_scaler_is_refused() -> None:
    assert reason(CARD, precision="fp16-mixed").endswith("use bf16-mixed.")


def test_more_than_the_host_has_is_refused_where_it_would_be_run() -> None:
    workload = dataclasses.replace(tiny.llama_workload(), traits=traits(parameters=8 * 2**30))

    def said(hardware: Hardware, **knobs: Any) -> str | None:
        config = canonicalize(
            {"optimizer_offload": "cpu", "precision": "bf16", **knobs}, workload, hardware
        )
        return refuse(config, workload, hardware)

    card = dataclasses.replace(CARD, host_memory_bytes=63 * GIB)
    expected = "optimizer_offload: the host would hold 64 GiB at least, and has 63; use none, or train adapters."
    assert said(card) == expected
    assert said(card, precision="fp32") == expected.replace("64", "128")
    assert said(card, lora_rank=8) is None
    assert said(dataclasses.replace(card, here=False)) is None
    assert said(dataclasses.replace(card, host_memory_bytes=64 * GIB)) is None


def traits(*, parameters: int) -> Traits:
    return Traits(
        parameters=parameters,
        blocks=2,
        linears=2,
        attention=False,
        sdpa=False,
        batch_norm=False,
        dropout=False,
    )


def test_without_torchao_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install torchao" in reason(CARD)


# On a GPU.


def shows(effect: Effect) -> None:
    """After a step, the state of large weights is on the host, and the device holds that much less."""
    large = [weight for _, weight in effect.setup.trainable() if weight.numel() >= 4096]
    assert large
    held: dict[str, int] = {}
    for name, setup in (("offloaded", effect.setup), ("plain", effect.off)):
        before = torch.cuda.memory_allocated()
        train_step(setup, setup.workload.batch(4))
        held[name] = torch.cuda.memory_allocated() - before
    state = effect.setup.optimizer.state
    assert {state[weight]["exp_avg"].device.type for weight in large} == {"cpu"}
    saved = sum(2 * weight.nbytes for weight in large)
    assert held["plain"] - held["offloaded"] == pytest.approx(saved, rel=0.1)


@pytest.mark.gpu
def test_on_the_gpu_it_trains_as_plain_adamw_does_and_its_state_is_on_the_host(
    tmp_path: Path,
) -> None:
    hardware, workload = detect("cuda"), wide_workload()
    train_step(build(workload, {}, hardware), workload.batch(4))  # what libraries allocate once

    def on_gpu(value: str) -> Setup:
        chosen = Hyperparameters(lr=1e-3, weight_decay=0.1, max_grad_norm=0.01)
        config = {"optimizer_offload": value, "micro_batch_size": 2}
        return build(workload, config, hardware, hyperparameters=chosen)

    plain, offloaded = on_gpu("none"), on_gpu("cpu")
    shows(Effect("cpu", offloaded, plain))
    assert all(host.is_pinned() for host in offloaded.optimizer._inner.param_d2h_map.values())
    for _ in range(3):
        train_step(plain, workload.batch(4))
        train_step(offloaded, workload.batch(4))
    for (_, one), (_, other) in zip(plain.trainable(), offloaded.trainable(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    checkpoint.save(offloaded, tmp_path, 4)
    again = on_gpu("cpu")
    checkpoint.load(again, tmp_path)
    assert train_step(again, workload.batch(4)) == train_step(offloaded, workload.batch(4))
    for (_, one), (_, other) in zip(again.trainable(), offloaded.trainable(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_on_the_gpu_weights_and_gradients_at_rest_leave_two_and_three_blocks_and_learn_the_same() -> (
    None
):
    workload, block, seen = stacked(2048), 2 * 2048 * 4096 * 4, []
    torch.manual_seed(0)
    start = {name: value.clone() for name, value in workload.model().state_dict().items()}
    for knobs in ({"micro_batch_size": 2}, AT_REST):
        model = workload.model()
        model.load_state_dict(start)
        setup = build(
            workload, knobs, detect("cuda"), model=model, hyperparameters=Hyperparameters(lr=1e-4)
        )
        seen.append(trained_on_card(setup, workload.batch(4)))
        del setup, model
    (plain, weights), (peak, streamed) = seen
    # Weights, gradients and two moments of five blocks, against weights of two and gradients of three.
    assert plain - peak == pytest.approx((4 * BLOCKS - 5) * block, rel=0.1)
    for name, value in weights.items():
        torch.testing.assert_close(value, streamed[name], rtol=1e-4, atol=1e-6)


def wide_workload(width: int = 1024, depth: int = 4) -> Workload:
    """Matrices of 4 MiB each and their biases, which stay on the device."""
    return Workload(
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))),
        batch=lambda n: torch.randn(n, width, generator=torch.Generator().manual_seed(n)),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        effective_batch_size=4,
    )
