"""parameter_offload: what it is refused for, and that a run holds its frozen weights on the host from the start."""

import dataclasses
import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from autofit.core.errors import RefusedError
from autofit.core.knobs.parameter_offload import blocks_streamed
from autofit.core.some_blocks import offloaded_of
from autofit.core.workload import Traits, Workload
from autofit.hardware.device import detect
from autofit.setup import Setup
from autofit.setup.host_copies import CopyLane
from autofit.setup.layers import repeated_blocks
from autofit.setup.streamed_blocks import BlockStreamer
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.checkpoint import load, save
from autofit.training.evaluation import evaluate
from autofit.training.save_model import save_model
from autofit.training.step import accumulate, train_step
from tests import tiny
from tests.streaming import resident_bytes, streamed_bytes, trained_on_card

LORA = {"lora_rank": 4, "lora_targets": "all-linear"}
OFFLOAD = {"parameter_offload": "cpu", **LORA}
CUDA = dataclasses.replace(tiny.CPU, device="cuda", name="a card", capability=(8, 0))
TRAITS = Traits(
    parameters=1, blocks=2, linears=2, attention=False, sdpa=False, batch_norm=False, dropout=False
)
TECHNIQUE = technique_named("parameter_offload")
WIDTH, DEPTH = 384, 5
MATRIX = WIDTH * 2 * WIDTH * 4  # 1.1 MiB; two in each block


def beside(value: Any) -> dict[str, Any]:
    return LORA


def wide(width: int = WIDTH, depth: int = DEPTH, samples: int = 4) -> Workload:
    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(count)
        features = torch.randn(count, width, generator=generator)
        return features, torch.randint(10, (count,), generator=generator)

    return dataclasses.replace(
        tiny.mlp_workload(samples), model=lambda: tiny.MLP(width, depth), batch=batch
    )


@pytest.fixture
def streamers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockStreamer]]:
    """Let it run here, with copies that are done at once; what was made."""
    made: list[BlockStreamer] = []
    start = BlockStreamer.__init__

    def noted(streamer: BlockStreamer, *args: Any, **kwargs: Any) -> None:
        start(streamer, *args, **kwargs)
        made.append(streamer)

    monkeypatch.setattr(TECHNIQUE, "refuse", lambda *_: None)
    monkeypatch.setattr(CopyLane, "of", lambda device: CopyLane(None))
    monkeypatch.setattr(BlockStreamer, "__init__", noted)
    yield made


def living(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model()


def built(workload: Workload, config: dict[str, Any]) -> Setup:
    model = living(workload)
    torch.manual_seed(1)  # of the adapters
    return build(workload, config, tiny.CPU, model=model)


@pytest.mark.parametrize(
    ("knobs", "traits", "hardware", "reason"),
    [
        (OFFLOAD, None, tiny.CPU, "parameter_offload: on a CPU, device and host share one memory"),
        (
            {"parameter_offload": "cpu"},
            None,
            CUDA,
            "parameter_offload: trained weights are streamed where the backward or the host updates them",
        ),
        (
            {"parameter_offload": "cpu", "optimizer_in_backward": True, "micro_batch_size": 4},
            None,
            CUDA,
            None,
        ),
        (
            {"parameter_offload": "cpu", "optimizer_offload": "cpu", "micro_batch_size": 1},
            None,
            CUDA,
            None,
        ),
        (OFFLOAD, TRAITS, CUDA, "parameter_offload: fewer than 3 repeated blocks have weights"),
        (LORA | {"parameter_offload": "cpu:2"}, None, CUDA, "parameter_offload: of fewer than 3"),
        (LORA | {"parameter_offload": "cpu:3"}, None, CUDA, None),
        (OFFLOAD, None, CUDA, None),
        (OFFLOAD | {"parameter_offload": "none"}, TRAITS, tiny.CPU, None),
    ],
)
def test_what_it_is_refused_for(
    knobs: dict[str, Any], traits: Traits | None, hardware: Any, reason: str
) -> None:
    workload = dataclasses.replace(wide(), traits=traits)
    if "optimizer_offload" in knobs:
        pytest.importorskip("torchao")
    said = refuse(canonicalize(knobs, workload, hardware), workload, hardware)
    assert said is None if reason is None else said.startswith(reason)


def test_it_is_searched_only_where_there_are_two_memories() -> None:
    assert TECHNIQUE.choices(tiny.CPU) == ("none",)
    assert TECHNIQUE.choices(CUDA) == ("none", "cpu")


@pytest.mark.parametrize(
    ("value", "canonical"), [("cpu:0", "none"), ("cpu:04", "cpu:4"), ("cpu:5", "cpu")]
)
def test_one_word_where_all_blocks_are_alike(value: str, canonical: str) -> None:
    workload = dataclasses.replace(wide(), traits=dataclasses.replace(TRAITS, blocks=DEPTH))
    config = canonicalize(LORA | {"parameter_offload": value}, workload, CUDA)
    assert config.parameter_offload == canonical
    assert TECHNIQUE.keeps_on_host(canonical) == (canonical != "none")


@given(st.integers(1, 100), st.integers(0, 120))
def test_some_blocks_are_spread_as_evenly_as_can_be(blocks: int, number: int) -> None:
    found = blocks_streamed(f"cpu:{number}", blocks)
    assert len(found) == offloaded_of(f"cpu:{number}", blocks) == min(number, blocks)
    gaps = (
        {after - before for before, after in pairwise([found[-1] - blocks, *found])}
        if found
        else {0}
    )
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    "workload", [wide(depth=2), wide(width=48)], ids=["two blocks", "small weights"]
)
def test_a_model_with_nothing_to_gain_is_refused_and_left_as_it_was(
    streamers: list[BlockStreamer], workload: Workload
) -> None:
    model = living(workload)
    with pytest.raises(RefusedError, match="fewer than 3 repeated blocks have weights"):
        build(workload, OFFLOAD, tiny.CPU, model=model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("given", [True, False], ids=["a living model", "a new model"])
def test_building_never_has_more_than_one_frozen_weight_on_the_device(
    streamers: list[BlockStreamer], monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    workload, there = wide(), []
    hold = BlockStreamer.hold

    def noted(streamer: BlockStreamer, block: Any, slot: Any, weight: nn.Parameter) -> None:
        hold(streamer, block, slot, weight)
        there.append(
            sum(each.storage.nbytes() for block in streamer.blocks for each in block.memories)
        )

    monkeypatch.setattr(BlockStreamer, "hold", noted)
    build(workload, OFFLOAD, tiny.CPU, model=living(workload) if given else None)
    assert there == [0] * 2 * DEPTH
    assert streamed_bytes(streamers[0]) == 2 * DEPTH * MATRIX


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"parameter_offload": "cpu:3"},
        {"parameter_offload": "cpu:4", "activation_checkpointing": "full"},
        {"activation_checkpointing": "full"},
        {"micro_batch_size": 2},
        {"lora_rank": 0, "head_only": True},
        {"precision": "bf16-mixed"},
        {"quantization": "nf4-dq"},
        {"quantization": "int8", "activation_checkpointing": "full"},
    ],
)
def test_gradients_are_the_same_with_two_blocks_on_the_device(
    streamers: list[BlockStreamer], knobs: dict[str, Any]
) -> None:
    workload, log = wide(), []
    plain = built(workload, LORA | knobs | {"parameter_offload": "none"})
    streamed = built(workload, OFFLOAD | knobs)
    for block in repeated_blocks(streamed.model):
        block.register_forward_hook(lambda *_: log.append(resident_bytes(streamers[0])))
    batch = workload.batch(4)
    for _ in range(2):
        assert torch.equal(accumulate(plain, batch), accumulate(streamed, batch))
    for (name, one), (_, other) in zip(plain.trainable(), streamed.trainable(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    blocks = offloaded_of(streamed.config.parameter_offload, DEPTH)
    assert max(log) == 2 * streamed_bytes(streamers[0]) / blocks
    bits = {"nf4-dq": 4, "int8": 8}.get(
        str(knobs.get("quantization")), 16 if "precision" in knobs else 32
    )
    assert streamed_bytes(streamers[0]) == 2 * blocks * MATRIX * bits // 32


def test_steps_evaluations_checkpoints_and_the_end(
    streamers: list[BlockStreamer], tmp_path: Path
) -> None:
    workload = wide()
    setup = built(workload, OFFLOAD)
    parameters = {
        name: parameter
        for name, parameter in setup.model.named_parameters()
        if not parameter.requires_grad
    }
    batch = workload.batch(4)
    losses = [float(train_step(setup, batch)) for _ in range(2)]
    assert evaluate(setup, [batch]) < losses[0]
    save(setup, tmp_path, 2)
    assert load(setup, tmp_path).next_step == 2
    losses.append(float(train_step(setup, batch)))
    assert losses[2] < losses[1] < losses[0]
    save_model(setup, tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")
    assert resident_bytes(streamers[0]) < streamed_bytes(streamers[0]) / 2
    setup.close()
    original = dict(living(workload).named_parameters())
    for name, parameter in parameters.items():
        assert setup.model.get_parameter(name) is parameter
        assert torch.equal(parameter, original[name.replace(".base_layer", "")])


def test_beside_activation_offload_no_weight_is_packed(
    streamers: list[BlockStreamer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(technique_named("activation_offload"), "refuse", lambda *_: None)
    workload = wide(samples=1024)
    plain, both = built(workload, LORA), built(workload, OFFLOAD | {"activation_offload": "cpu"})
    batch = workload.batch(1024)
    assert torch.equal(accumulate(plain, batch), accumulate(both, batch))
    for (_, one), (_, other) in zip(plain.trainable(), both.trainable(), strict=True):
        assert torch.equal(one.grad, other.grad)
    offload = next(each.__self__ for each in both.forward_contexts if hasattr(each, "__self__"))
    features, inside = 1024 * WIDTH * 4, 1024 * 2 * WIDTH * 4
    # What adapters save enters the layers and what relu does: no weight, and the frozen matrices save nothing else.
    assert offload.packed_bytes == (DEPTH + 1) * features + DEPTH * inside


# dynamo looks at that of every input, also without streaming
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks(streamers: list[BlockStreamer], monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = technique_named("compile")
    monkeypatch.setattr(f"{type(compiling).__module__}.BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "refuse", lambda *_: None)
    workload = wide()
    plain, streamed = built(workload, LORA), built(workload, OFFLOAD | {"compile": "default"})
    batch = workload.batch(4)
    for _ in range(2):
        torch.testing.assert_close(accumulate(plain, batch), accumulate(streamed, batch))
    for (_, one), (_, other) in zip(plain.trainable(), streamed.trainable(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert resident_bytes(streamers[0]) < streamed_bytes(streamers[0]) / 2
    streamed.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "knobs", [{}, {"quantization": "nf4"}, {"activation_checkpointing": "full"}]
)
def test_on_a_card_the_peak_falls_by_all_blocks_but_two(knobs: dict[str, Any]) -> None:
    workload = wide(width=4096, depth=12)  # 256 MiB in each block in fp32

    def run(config: dict[str, Any]) -> tuple[int, int, list[torch.Tensor]]:
        gc.collect()  # a quantised weight and its layer hold each other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = living(workload)
        torch.manual_seed(1)
        setup = build(workload, config, detect("cuda"), model=model)
        built_peak = torch.cuda.max_memory_allocated()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            loss = accumulate(setup, workload.batch(4))
        peak = torch.cuda.max_memory_allocated()
        grads = [parameter.grad.clone() for _, parameter in setup.trainable()]
        setup.close()
        return built_peak, peak, [loss, *grads]

    plain_built, plain_peak, plain = run(LORA | knobs)
    streamed_built, peak, streamed = run(OFFLOAD | knobs)
    for one, other in zip(plain, streamed, strict=True):
        torch.testing.assert_close(one, other)
    block = 2 * 4096 * 8192 * 4 // (8 if "quantization" in knobs else 1)
    assert plain_peak - peak == pytest.approx(10 * block, rel=0.1)
    assert plain_built - streamed_built > 9 * block


WHOLE = {"optimizer_in_backward": True, "micro_batch_size": 4}
OPTIMIZERS = [
    value
    for value in technique_named("optimizer").values
    if value not in ("adamw", "paged-adamw", "paged-adamw-8bit")
]


def trained(
    workload: Workload, config: dict[str, Any], steps: int, **options: Any
) -> tuple[Setup, list[torch.Tensor]]:
    """A training of all weights, and the loss of each step."""
    setup = build(workload, config, tiny.CPU, model=living(workload), **options)
    return setup, [train_step(setup, workload.batch(4)).clone() for _ in range(steps)]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "alternate", "parameter_offload": "cpu:4"},
        {"precision": "bf16"},
        {"precision": "bf16-mixed"},
        *(
            {"optimizer": value, "precision": "bf16" if value[-2:] in ("sr", "er") else "fp32"}
            for value in OPTIMIZERS
        ),
    ],
    ids=str,
)
def test_trained_weights_are_streamed_where_the_backward_updates_them(
    streamers: list[BlockStreamer], knobs: dict[str, Any]
) -> None:
    workload, log = wide(), []
    (plain, expected), (streamed, _) = (
        trained(workload, WHOLE | knobs | {"parameter_offload": "none"}, 3),
        trained(workload, WHOLE | {"parameter_offload": "cpu"} | knobs, 0),
    )
    for block in repeated_blocks(streamed.model):
        block.register_forward_hook(lambda *_: log.append(resident_bytes(streamers[0])))
    found = [train_step(streamed, workload.batch(4)).clone() for _ in range(3)]
    assert torch.equal(torch.stack(expected), torch.stack(found))
    blocks = offloaded_of(streamed.config.parameter_offload, DEPTH)
    assert max(log) == 3 * streamed_bytes(streamers[0]) / blocks
    assert streamed_bytes(streamers[0]) >= 2 * blocks * MATRIX // (
        2 if knobs.get("precision") == "bf16" else 1
    )
    for (name, one), (_, other) in zip(plain.trainable(), streamed.trained_values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_blocks_of_trained_weights(
    streamers: list[BlockStreamer], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = technique_named("compile")
    monkeypatch.setattr(f"{type(compiling).__module__}.BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "refuse", lambda *_: None)
    workload = wide()
    _, expected = trained(workload, WHOLE, 3)
    compiled, found = trained(
        workload, WHOLE | {"parameter_offload": "cpu", "compile": "default"}, 3
    )
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    assert resident_bytes(streamers[0]) < streamed_bytes(streamers[0])
    compiled.close()


def test_a_training_of_streamed_weights_is_saved_and_goes_on(
    streamers: list[BlockStreamer], tmp_path: Path
) -> None:
    workload, config = wide(), WHOLE | {"parameter_offload": "cpu", "optimizer": "adamw"}
    plain, expected = trained(workload, WHOLE | {"optimizer": "adamw"}, 4)
    setup, losses = trained(workload, config, 2)
    save(setup, tmp_path, 2)
    # after which the checkpoint must still hold the former weights
    losses.append(train_step(setup, workload.batch(4)))
    again, _ = trained(workload, config, 1)
    assert load(again, tmp_path).next_step == 2
    assert evaluate(again, [workload.batch(4)]) == pytest.approx(float(expected[2]))
    losses[2:] = [train_step(again, workload.batch(4)) for _ in range(2)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    save_model(again, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    again.close()
    for (name, one), (_, other) in zip(plain.trainable(), again.trainable(), strict=True):
        assert torch.equal(one, other), name
        assert torch.equal(one, saved[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_on_a_card_trained_weights_leave_three_blocks_there_and_learn_the_same(
    optimizer: str,
) -> None:
    workload, seen = wide(width=2048, depth=12), []  # 64 MiB in each block in fp32
    for where in ("none", "cpu"):
        config = WHOLE | {
            "optimizer": optimizer,
            "parameter_offload": where,
            "activation_checkpointing": "full",
        }
        setup = build(workload, config, detect("cuda"), model=living(workload))
        seen.append(trained_on_card(setup, workload.batch(4)))
        del setup
    (plain, weights), (peak, streamed) = seen
    block = 2 * 2048 * 4096 * 4
    assert plain - peak == pytest.approx(9 * block, rel=0.1)
    for name, value in weights.items():
        torch.testing.assert_close(value, streamed[name])
