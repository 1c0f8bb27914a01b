"""optimizer: groups, decay, the bytes of every kind of state, and what is said where a library or a GPU is missing."""

import dataclasses
import functools
import importlib.util
import math
import re
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.config import Value
from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.workload import Hyperparameters, Workload
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup, requirements
from autofit.setup.master_weights import MasterWeights
from autofit.setup.muon import MuonBesideAdamW, matrices_of_blocks
from autofit.techniques import canonicalize, refuse, technique_named
from autofit.training import checkpoint
from autofit.training.build import build
from autofit.training.loop import train
from autofit.training.step import train_step
from tests import tiny
from tests.techniques.contract import Effect, knobs

OPTIMIZER = technique_named("optimizer")
LOW_BIT = ("adamw-4bit", "adamw-fp8")
# Inductor's own import of it
IN_EARNEST = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
PAGED = ("paged-adamw", "paged-adamw-8bit")
OF_BF16 = ("adamw-master", "adamw-sr", "adamw-8bit-sr")
ON_CPU = tuple(value for value in OPTIMIZER.values if value not in PAGED)


def beside(value: Value) -> dict[str, Value]:
    return {"precision": "bf16"} if value in OF_BF16 else {}


def card(capability: tuple[int, int]) -> Hardware:
    """A GPU of 24 GiB."""
    return dataclasses.replace(
        tiny.CPU, device="cuda", name="a card", memory_bytes=24 * GIB, capability=capability
    )


def reason(value: str, hardware: Hardware = tiny.CPU) -> str | None:
    workload = tiny.mlp_workload()
    return refuse(canonicalize(knobs("optimizer", value), workload, hardware), workload, hardware)


# Groups and hyperparameters.


@pytest.mark.parametrize("value", ON_CPU)
def test_weight_decay_falls_on_matrices_only(value: str) -> None:
    hyperparameters = Hyperparameters(lr=0.02, weight_decay=0.3)
    setup = build(
        tiny.conv_workload(), knobs("optimizer", value), tiny.CPU, hyperparameters=hyperparameters
    )
    groups = setup.optimizer.param_groups
    decay = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {(parameter.dim() >= 2, decay[parameter]) for _, parameter in setup.trainable()} == {
        (True, 0.3),
        (False, 0.0),
    }
    assert {group["lr"] for group in groups} == {0.02}


@pytest.mark.parametrize("value", [value for value in ON_CPU if value not in OF_BF16])
def test_weight_decay_pulls_weights_towards_zero(value: str) -> None:
    def after(weight_decay: float) -> torch.Tensor:
        hyperparameters = Hyperparameters(lr=1e-3, weight_decay=weight_decay)
        setup = build(
            tiny.mlp_workload(), {"optimizer": value}, tiny.CPU, hyperparameters=hyperparameters
        )
        train_step(setup, setup.workload.batch(4))
        # 4608 elements: large enough for every format
        return setup.model.layers[0][0].weight.detach()

    before = build(tiny.mlp_workload(), {}, tiny.CPU).model.layers[0][0].weight.detach()
    pulled = after(0.0) - after(0.5)
    # Adafactor divides by the weight's gradient alone, all others decay before: both leave lr x decay x weight.
    torch.testing.assert_close(pulled, 1e-3 * 0.5 * before, rtol=1e-3, atol=1e-7)


def test_a_group_without_parameters_is_left_out() -> None:
    setup = build(tiny.mlp_workload(), {"lora_rank": 4}, tiny.CPU)
    assert [len(group["params"]) for group in setup.optimizer.param_groups] == [2 * 9]


@pytest.mark.parametrize("value", ON_CPU)
def test_another_one_of_the_same_kind_can_be_made(value: str) -> None:
    config = knobs("optimizer", value)
    setup = build(tiny.mlp_workload(), config, tiny.CPU, hyperparameters=Hyperparameters(lr=0.25))
    weight = nn.Parameter(torch.ones(64, 64, dtype=setup.weights.trainable_dtype))
    another = setup.make_optimizer([{"params": [weight], "weight_decay": 0.5}])
    assert type(another) is type(setup.optimizer)
    assert [
        (group["params"], group["lr"], group["weight_decay"]) for group in another.param_groups
    ] == [([weight], 0.25, 0.5)]
    weight.grad = torch.ones_like(weight)
    another.step()
    assert (weight < 1).all()


@pytest.mark.parametrize("value", ON_CPU)
def test_the_loops_learning_rate_is_the_one_that_is_stepped_with(value: str) -> None:
    def moved(warmup_steps: int) -> float:
        # the first step of 9 of warm-up is at a tenth
        chosen = Hyperparameters(lr=1e-3, warmup_steps=warmup_steps)
        setup = build(
            tiny.mlp_workload(), knobs("optimizer", value), tiny.CPU, hyperparameters=chosen
        )
        before = setup.model.out.weight.detach().clone()
        train(setup, [setup.workload.batch(4)] * 2, steps=1)
        return float((setup.model.out.weight.detach() - before).norm())

    # What is rounded moves by whole steps of the format.
    assert moved(9) == pytest.approx(0.1 * moved(0), rel=1 if value in OF_BF16 else 1e-2)


def test_adafactor_takes_the_learning_rate_as_adamw_does() -> None:
    """torch's default would step weights of 0.02 by a fiftieth of it, and small bf16 gradients by next to nothing."""

    def root_mean_square_moved(value: str, precision: str, scale: float) -> float:
        workload = dataclasses.replace(
            tiny.mlp_workload(), loss=lambda model, batch: scale * tiny.classify(model, batch)
        )
        config = {"optimizer": value, "precision": precision}
        setup = build(workload, config, tiny.CPU, hyperparameters=Hyperparameters(lr=1e-2))
        before = setup.model.out.weight.detach().clone()
        train_step(setup, workload.batch(4))
        return float((setup.model.out.weight.detach() - before).float().square().mean().sqrt())

    for precision in ("fp32", "bf16"):
        for scale in (1.0, 1e-4):
            adamw, adafactor = (
                root_mean_square_moved(value, precision, scale) for value in ("adamw", "adafactor")
            )
            assert 0.7 * adamw < adafactor < 1.1 * adamw, (precision, scale)


# What is refused, offered and preferred.


@pytest.mark.parametrize(
    ("value", "library"),
    [
        ("adamw-8bit", "bitsandbytes"),
        ("paged-adamw-8bit", "bitsandbytes"),
        ("paged-adamw", "bitsandbytes"),
        ("lion-8bit", "bitsandbytes"),
        ("adamw-4bit", "torchao"),
        ("adamw-sr", "torchao"),
        ("adamw-8bit-sr", "torchao"),
        ("adamw-fp8", "torchao"),
    ],
)
def test_without_its_library_it_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, value: str, library: str
) -> None:
    assert OPTIMIZER.package(value) == library
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert reason(value) == (
        f"optimizer: {value} needs {library}, which is not installed; pip install {library}, or use adamw."
    )
    assert reason("adamw") is None


@pytest.mark.parametrize("value", LOW_BIT)
@pytest.mark.parametrize("hardware", [tiny.CPU, card((9, 0))], ids=["cpu", "cuda"])
def test_without_a_compiler_torchaos_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, hardware: Hardware
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(requirements, "no_compiler", lambda *_: None)
        assert reason(value, hardware) is None
    monkeypatch.setattr(requirements, "installed", lambda name: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert re.search(
        rf"{value} compiles its step: .* install .*, or use adamw-8bit\.", reason(value, hardware)
    )
    assert reason("adamw-8bit", hardware) is None


def test_the_paged_one_is_refused_where_there_is_nothing_to_page() -> None:
    """bitsandbytes warns there, and allocates plainly: the value would mean nothing."""
    from bitsandbytes.optim import PagedAdamW8bit

    weight = nn.Parameter(torch.ones(400, 400))
    weight.grad = torch.ones(400, 400)
    optimizer = PagedAdamW8bit([weight])
    with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
        optimizer.step()
    assert not hasattr(optimizer.state[weight]["state1"], "is_paged")
    assert "use adamw-8bit" in reason("paged-adamw-8bit")
    assert reason("paged-adamw-8bit", card((8, 0))) is None


def test_fp8_needs_a_card_that_knows_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "no_compiler", lambda *_: None)
    assert reason("adamw-fp8", card((8, 6))) == (
        "optimizer: adamw-fp8 needs compute capability 8.9, a card has 8.6; use adamw-8bit."
    )
    assert reason("adamw-fp8", card((8, 9))) is None
    assert set(OPTIMIZER.values) - set(OPTIMIZER.choices(card((8, 6)))) == {"adamw-fp8"}
    assert OPTIMIZER.choices(card((8, 9))) == OPTIMIZER.values


def test_what_takes_a_minute_to_compile_is_not_searched_on_a_cpu() -> None:
    compiled = {*LOW_BIT, "adamw-sr", "adamw-8bit-sr"}
    assert set(OPTIMIZER.values) - set(OPTIMIZER.choices(tiny.CPU)) == {*compiled, *PAGED}
    assert all(OPTIMIZER.accepts(value, tiny.CPU) for value in OPTIMIZER.values)


def test_more_bits_learn_more_faithfully() -> None:
    order = sorted(OPTIMIZER.values, key=OPTIMIZER.fidelity, reverse=True)
    ranks = [OPTIMIZER.fidelity(value) for value in order]
    assert order == [
        *OF_BF16,
        *("adamw", "adamw-foreach", "paged-adamw"),
        *(
            "adamw-8bit",
            "paged-adamw-8bit",
            "muon",
            "adamw-fp8",
            "adamw-4bit",
            "lion-8bit",
            "adafactor",
            "sgd",
        ),
    ]
    assert ranks == [8, 7, 6, 5, 5, 5, 4, 4, 4, 3, 2, 1, 1, 0]


def test_only_what_is_proven_is_ordered() -> None:
    assert OPTIMIZER.memory_order("sgd") < OPTIMIZER.memory_order("adamw")
    # Fp32 state of small tensors against bf16 state; step counters on the host against ones on the device; temporaries.
    assert {OPTIMIZER.memory_order(value) for value in OPTIMIZER.values} == {0, 1, None}


def test_the_8_bit_state_of_small_tensors_is_larger_than_adamws_in_bf16() -> None:
    """Why adamw-8bit is not ordered below adamw."""

    def state_bytes(value: str) -> int:
        setup = build(tiny.llama_workload(), {"optimizer": value, "precision": "bf16"}, tiny.CPU)
        train_step(setup, setup.workload.batch(4))
        small = [parameter for _, parameter in setup.trainable() if parameter.numel() < 4096]
        return sum(moment_bytes(setup.optimizer.state[parameter]) for parameter in small)

    assert state_bytes("adamw-8bit") > state_bytes("adamw")


# Weights in bf16.


@pytest.mark.parametrize("value", OF_BF16)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_what_is_for_bf16_weights_is_refused_beside_others(value: str, precision: str) -> None:
    workload = tiny.mlp_workload()
    config = canonicalize({"optimizer": value, "precision": precision}, workload, tiny.CPU)
    found = refuse(config, workload, tiny.CPU)
    assert (
        found
        == f"optimizer: {value} is for bf16 weights, and those of {precision} need none of it; use adamw."
    )


@pytest.mark.parametrize(
    ("value", "learns"), [("adamw", False), *((value, True) for value in OF_BF16)]
)
def test_small_updates_of_bf16_weights_count(value: str, learns: bool) -> None:
    """Fifty updates of 1e-4 of weights of 1, which bf16 tells from 1 - 1/256 and from no number between."""
    hyperparameters = Hyperparameters(lr=1e-4)
    config = {"optimizer": value, "precision": "bf16"}
    setup = build(one_layer(64, 64), config, tiny.CPU, hyperparameters=hyperparameters)
    weight = setup.model.weight
    weight.data.fill_(1.0)
    torch.manual_seed(0)
    with StorageTracker():  # under which nothing is compiled
        for _ in range(50):
            weight.grad = torch.ones_like(weight)
            setup.optimizer.step()
    assert weight.dtype is torch.bfloat16
    moved = 1 - float(weight.detach().float().mean())
    assert moved == pytest.approx(50e-4 if learns else 0.0, rel=0.25)
    assert bool(setup.warnings) is not learns


# The bytes of state.


def held(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The plain tensors that one weight's state is made of, also those inside torchao's kinds of tensor."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if is_traceable_wrapper_subclass(value):
            found |= {
                f"{key}.{name}": getattr(value, name) for name in value.__tensor_flatten__()[0]
            }
        elif isinstance(value, torch.Tensor):
            found[key] = value
    return found


def moment_bytes(state: dict[str, Any]) -> int:
    """Bytes of numbers and scales; step counters and code books do not grow with the weight."""
    return sum(
        tensor.nbytes
        for name, tensor in held(state).items()
        if name != "step" and "map" not in name
    )


def expected_bytes(value: str, weight: torch.Tensor) -> float:
    """What the format takes for one weight: numbers, and an fp32 scale for every block of 256, or 128 at 4 bits."""
    n, size = weight.numel(), weight.itemsize
    if value == "sgd":
        return 0
    if value == "adafactor":
        return (
            size * (n / weight.shape[-1] + n / weight.shape[-2]) if weight.dim() > 1 else size * n
        )
    if value in ("adamw-8bit", "lion-8bit"):
        moments = 2 if value == "adamw-8bit" else 1
        return moments * (n + 4 * math.ceil(n / 256) if n >= 4096 else 4 * n)
    if value in ("adamw-master", "adamw-sr"):
        return (12 if value == "adamw-master" else 8) * n
    if value in ("adamw-fp8", "adamw-8bit-sr") and n >= 4096 and n % 256 == 0:
        return 2 * n + 2 * 4 * n / 256
    if value == "adamw-4bit" and n >= 4096 and n % 128 == 0:
        return n + 2 * 4 * n / 128
    return 2 * size * n


FORMATS = dict.fromkeys(("adamw-8bit", "adamw-8bit-sr", "adamw-4bit", "lion-8bit"), torch.uint8)
FORMATS |= {"adamw-fp8": torch.float8_e4m3fn}


def shows(effect: Effect) -> None:
    """Whose optimizer it is, every byte of its state, and that its step is another one than the fused AdamW's."""
    import bitsandbytes.optim
    import torchao.optim

    kinds = {
        "adamw-foreach": torch.optim.AdamW,
        "adamw-8bit": bitsandbytes.optim.AdamW8bit,
        "adamw-4bit": torchao.optim.AdamW4bit,
        "adamw-fp8": torchao.optim.AdamWFp8,
        "adamw-sr": torchao.optim._AdamW,
        "adamw-8bit-sr": torchao.optim.AdamW8bit,
        "adamw-master": MasterWeights,
        "lion-8bit": bitsandbytes.optim.Lion8bit,
        "muon": MuonBesideAdamW,
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
    }
    optimizer, ran = effect.setup.optimizer, effect.trace.ran
    assert isinstance(optimizer, kinds[effect.value])
    assert effect.off_trace.ran("_fused_adamw_")
    assert ran("_fused_adamw_") == (effect.value in ("adamw-master", "muon"))
    matrices = matrices_of_blocks(effect.setup.model) if effect.value == "muon" else set()
    assert ran("randint") == effect.value.endswith("-sr")
    assert ran("_foreach_addcdiv_") == (effect.value == "adamw-foreach")
    for name, weight in effect.setup.trainable():
        state = optimizer.state.get(weight, {})
        expected = weight.nbytes if weight in matrices else expected_bytes(effect.value, weight)
        assert moment_bytes(state) == expected, name
        if effect.value in FORMATS:
            assert (FORMATS[effect.value] in {each.dtype for each in held(state).values()}) == (
                weight.numel() >= 4096
            )


def one_layer(inputs: int = 512, outputs: int = 512) -> Workload:
    """Training one matrix, of a size that makes code books and counters small change."""
    return Workload(
        model=lambda: nn.Linear(inputs, outputs, bias=False),
        batch=lambda n: torch.randn(n, inputs, generator=torch.Generator().manual_seed(n)),
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        effective_batch_size=4,
    )


def bytes_per_parameter(setup: Setup) -> float:
    """Of everything in the state, after a step."""
    train_step(setup, setup.workload.batch(4))
    states = [setup.optimizer.state.get(weight, {}) for _, weight in setup.trainable()]
    kept = sum(tensor.nbytes for state in states for tensor in held(state).values())
    return kept / sum(weight.numel() for _, weight in setup.trainable())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("adamw", None),  # as the weights
        ("adamw-foreach", None),
        ("adamw-8bit", 2 + 2 * 4 / 256),
        ("adamw-fp8", 2 + 2 * 4 / 256),
        ("adamw-4bit", 1 + 2 * 4 / 128),
        ("lion-8bit", 1 + 4 / 256),
        ("sgd", 0),
    ],
)
def test_bytes_of_state_per_trained_parameter(
    value: str, expected: float | None, precision: str
) -> None:
    setup = build(one_layer(), {"optimizer": value, "precision": precision}, tiny.CPU)
    in_weights_format = {"fp32": 8, "bf16": 4}[precision]
    assert bytes_per_parameter(setup) == pytest.approx(
        in_weights_format if expected is None else expected, rel=0.02
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [("adamw-master", 12), ("adamw-sr", 8), ("adamw-8bit-sr", 2 + 2 * 4 / 256)],
)
def test_bytes_of_state_per_bf16_weight(value: str, expected: float) -> None:
    setup = build(one_layer(), knobs("optimizer", value), tiny.CPU)
    with StorageTracker():
        assert bytes_per_parameter(setup) == pytest.approx(expected, rel=0.02)


def test_adafactor_keeps_rows_and_columns() -> None:
    setup = build(one_layer(300, 700), {"optimizer": "adafactor"}, tiny.CPU)
    step_counter = 4
    assert bytes_per_parameter(setup) == (4 * (300 + 700) + step_counter) / (300 * 700)


def test_what_is_not_in_whole_blocks_torchao_keeps_as_adamw_does() -> None:
    """5000 elements are 19.5 blocks of 256, and 39.1 of 128."""
    for value in LOW_BIT:
        setup = build(one_layer(50, 100), {"optimizer": value}, tiny.CPU)
        assert bytes_per_parameter(setup) == pytest.approx(8, rel=0.01)


# torchao's step is compiled.


@pytest.mark.parametrize("value", LOW_BIT)
def test_torchaos_step_is_compiled_but_where_a_tracker_watches(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """And both do the same. torchao asks for one whole graph, which torch refuses under a dispatch mode."""
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    assert OPTIMIZER.compiles(value)
    assert not OPTIMIZER.compiles("adamw-8bit")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counted))
    torch._dynamo.reset()
    setups = [build(one_layer(64, 64), {"optimizer": value}, tiny.CPU) for _ in range(2)]
    with StorageTracker():
        for _ in range(2):
            train_step(setups[0], setups[0].workload.batch(4))
    assert not graphs
    for _ in range(2):
        train_step(setups[1], setups[1].workload.batch(4))
    assert graphs
    assert torch._dynamo.eval_frame._stance.stance == "default"
    watched, compiled = (setup.model.weight for setup in setups)
    torch.testing.assert_close(watched, compiled, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", LOW_BIT)
def test_a_step_that_fails_leaves_its_groups_as_they_were(value: str) -> None:
    setup = build(
        one_layer(64, 64), {"optimizer": value}, tiny.CPU, hyperparameters=Hyperparameters(lr=0.5)
    )
    weight = setup.model.weight
    weight.grad = torch.ones(64, 64).to_sparse()
    with pytest.raises(RuntimeError, match="Sparse gradient is not supported"), StorageTracker():
        setup.optimizer.step()
    assert [group["lr"] for group in setup.optimizer.param_groups] == [0.5]
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.slow
@IN_EARNEST
@pytest.mark.parametrize("value", LOW_BIT)
def test_torchaos_step_as_inductor_compiles_it(value: str) -> None:
    """The first step of Adam moves every weight by the learning rate, against its gradient, in any format."""
    setup = build(
        one_layer(64, 64), {"optimizer": value}, tiny.CPU, hyperparameters=Hyperparameters(lr=1e-3)
    )
    batch, before = setup.workload.batch(4), setup.model.weight.detach().clone()
    losses = [train_step(setup, batch)]
    torch.testing.assert_close(
        (setup.model.weight - before).abs(), torch.full((64, 64), 1e-3), rtol=1e-2, atol=1e-6
    )
    assert moment_bytes(setup.optimizer.state[setup.model.weight]) == expected_bytes(
        value, setup.model.weight
    )
    losses += [train_step(setup, batch) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


# Checkpoints.


def mlp_run(value: str) -> Setup:
    torch.manual_seed(0)
    config = knobs("optimizer", value)
    return build(tiny.mlp_workload(), config, tiny.CPU, hyperparameters=Hyperparameters(lr=1e-2))


@pytest.mark.parametrize("value", ON_CPU)
def test_its_state_comes_back_from_a_checkpoint(tmp_path: Path, value: str) -> None:
    first, batch = mlp_run(value), tiny.mlp_workload().batch(4)
    for _ in range(2):
        train_step(first, batch)
    checkpoint.save(first, tmp_path, 2)
    second = mlp_run(value)
    train_step(second, tiny.mlp_workload().batch(3))  # all that a checkpoint holds is another now
    assert checkpoint.load(second, tmp_path).next_step == 2
    losses = []
    for setup in (second, first):
        torch.manual_seed(0)  # for what is rounded stochastically
        losses.append([train_step(setup, batch) for _ in range(3)])
    assert losses[0] == losses[1]
    for (_, one), (_, other) in zip(first.trainable(), second.trainable(), strict=True):
        assert torch.equal(one, other)
        states = [
            held(setup.optimizer.state.get(weight, {}))
            for setup, weight in ((first, one), (second, other))
        ]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert all(states[0][key].dtype is states[1][key].dtype for key in states[0])


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_a_paged_state_that_is_loaded_lies_in_pages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes would leave it where the file was read to. Here its pages are plain memory, but asked for."""
    from bitsandbytes.optim import PagedAdamW8bit

    pages: list[torch.Tensor] = []
    ask = PagedAdamW8bit.get_state_buffer

    def recorded(optimizer: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        pages.append(ask(optimizer, weight, dtype))
        return pages[-1]

    monkeypatch.setattr(PagedAdamW8bit, "get_state_buffer", recorded)
    setups = [build(one_layer(), {}, tiny.CPU) for _ in range(2)]
    for setup in setups:
        OPTIMIZER.apply(setup, "paged-adamw-8bit")  # which `refuse` forbids on a CPU
        train_step(setup, setup.workload.batch(4))
    train_step(setups[0], setups[0].workload.batch(4))
    pages.clear()
    setups[1].optimizer.load_state_dict(setups[0].optimizer.state_dict())
    wanted, found = (held(setup.optimizer.state[setup.model.weight]) for setup in setups)
    assert [found["state1"], found["state2"]] == pages
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


# On a GPU.


@pytest.mark.gpu
@IN_EARNEST
@pytest.mark.parametrize("value", ON_CPU)
def test_every_kind_steps_on_the_gpu(tmp_path: Path, value: str) -> None:
    """And what a checkpoint brings back lies where it lay before: counters that were on the host would be slow to read
    from the device."""
    hardware = detect("cuda")
    if value not in OPTIMIZER.choices(hardware):
        pytest.skip(reason(value, hardware) or "")
    workload, chosen = one_layer(), Hyperparameters(lr=1e-3)
    setup = build(workload, knobs("optimizer", value), hardware, hyperparameters=chosen)
    weight = setup.model.weight
    losses = [train_step(setup, workload.batch(4)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert moment_bytes(setup.optimizer.state.get(weight, {})) == expected_bytes(value, weight)
    moments = [
        tensor
        for name, tensor in held(setup.optimizer.state.get(weight, {})).items()
        if name != "step"
    ]
    assert all(tensor.device == weight.device for tensor in moments)
    checkpoint.save(setup, tmp_path, 3)
    again = build(workload, knobs("optimizer", value), hardware, hyperparameters=chosen)
    assert checkpoint.load(again, tmp_path).next_step == 3
    assert train_step(again, workload.batch(4)) == train_step(setup, workload.batch(4))
    torch.testing.assert_close(again.model.weight, weight)
    was, now = (
        held(setup.optimizer.state.get(weight, {})),
        held(again.optimizer.state.get(again.model.weight, {})),
    )
    assert {key: tensor.device for key, tensor in now.items()} == {
        key: tensor.device for key, tensor in was.items()
    }


@pytest.mark.gpu
def test_the_paged_state_is_no_memory_of_the_allocator(tmp_path: Path) -> None:
    """It lies in pages from the start, and after a checkpoint too."""
    hardware = detect("cuda")
    workload = one_layer(1024, 1024)

    def run() -> Setup:
        return build(
            workload,
            {"optimizer": "paged-adamw-8bit"},
            hardware,
            hyperparameters=Hyperparameters(lr=1e-3),
        )

    first = run()
    losses = [train_step(first, workload.batch(4))]
    before = torch.cuda.memory_allocated()
    losses.append(train_step(first, workload.batch(4)))
    assert losses[1] < losses[0]
    checkpoint.save(first, tmp_path, 2)
    second = run()
    checkpoint.load(second, tmp_path)
    for setup in (first, second):
        state = setup.optimizer.state[setup.model.weight]
        assert state["state1"].is_paged
        assert state["state2"].is_paged
    # the second weight alone: 4 MiB
    assert torch.cuda.memory_allocated() - before < 1.1 * 4 * 2**20
    assert train_step(second, workload.batch(4)) == train_step(first, workload.batch(4))
    assert torch.equal(first.model.weight, second.model.weight)


def test_an_optimizer_of_ones_own_takes_the_place_of_the_knob() -> None:
    groups: list[Any] = []

    def own(given: Any) -> torch.optim.Optimizer:
        groups.append(given)
        return torch.optim.NAdam(given)

    workload = replace(tiny.mlp_workload(), optimizer=own)
    for knob in ({}, {"optimizer": "adamw-8bit"}, {"optimizer": None}):
        assert canonicalize(knob, workload, tiny.CPU)["optimizer"] is None
    setup = build(
        workload, {}, tiny.CPU, hyperparameters=Hyperparameters(lr=0.5, weight_decay=0.25)
    )
    assert type(setup.optimizer) is torch.optim.NAdam
    assert [group["weight_decay"] for group in groups[0]] == [0.25, 0.0]
    (report,) = train(setup, [workload.batch(4)], steps=1)
    assert {group["lr"] for group in setup.optimizer.param_groups} == {0.5}
    assert canonicalize({"optimizer": None}, tiny.mlp_workload(), tiny.CPU)["optimizer"] == "adamw"
    in_backward = build(workload, {"optimizer_in_backward": True}, tiny.CPU)
    assert train(in_backward, [workload.batch(4)], steps=1)[0].loss == report.loss


def test_what_makes_no_optimizer() -> None:
    workload = replace(tiny.mlp_workload(), optimizer=lambda groups: torch.optim.SGD)
    with pytest.raises(
        InputError, match=r"the optimizer function returned a type, not an Optimizer\. Return the"
    ):
        build(workload, {}, tiny.CPU)


def test_two_optimizers_are_one_sentence() -> None:
    workload = replace(
        tiny.mlp_workload(),
        optimizer=lambda groups: [torch.optim.SGD(groups), torch.optim.SGD(groups)],
    )
    words = r"the optimizer function returned a list of 2: autofit trains one loss with one optimizer\. .* a GAN"
    with pytest.raises(InputError, match=words):
        build(workload, {}, tiny.CPU)


def test_an_optimizer_of_ones_own_that_cannot_be_made_is_one_sentence() -> None:
    workload = replace(tiny.mlp_workload(), optimizer=torch.optim.LBFGS)
    with pytest.raises(
        InputError,
        match=r"the optimizer function raised ValueError: LBFGS doesn't support per-param",
    ):
        build(workload, {}, tiny.CPU)


def test_an_optimizer_of_ones_own_that_exits_is_one_sentence_too() -> None:
    workload = replace(tiny.mlp_workload(), optimizer=lambda _: sys.exit(3))
    with pytest.raises(
        InputError, match=r"the optimizer function raised SystemExit: 3\. Correct it\."
    ):
        build(workload, {}, tiny.CPU)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    workload = replace(
        tiny.mlp_workload(),
        optimizer=lambda groups: torch.optim.LBFGS([p for each in groups for p in each["params"]]),
    )
    with pytest.raises(
        InputError, match="LBFGS computes the loss several times a step, which autofit does not do"
    ):
        build(workload, {}, tiny.CPU)


def test_overrides_that_a_trainer_has_set_do_not_reach_our_8_bit_optimizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bitsandbytes.optim import GlobalOptimManager

    monkeypatch.setattr(
        GlobalOptimManager.get_instance(),
        "index2config",
        {(0, n): {"optim_bits": 32} for n in range(99)},
    )
    workload = tiny.llama_workload()
    with closing(build(workload, {"optimizer": "adamw-8bit"}, tiny.CPU)) as setup:
        train_step(setup, workload.batch(setup.workload.effective_batch_size))
        assert setup.optimizer is not None
        largest = max(setup.optimizer.state, key=torch.numel)
        assert setup.optimizer.state[largest]["state1"].dtype == torch.uint8
