"""The contract that every value of every technique keeps (DESIGN section 3), whoever wrote the technique.

A new technique gets all of this for an entry in EFFECTS, which says how its values are seen to take effect.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.config import Config, Value
from autofit.core.hyperparameters import Hyperparameters
from autofit.core.strict_yaml import dump, parse
from autofit.core.workload import Workload
from autofit.memory.tracker import StorageTracker
from autofit.setup import Setup, Technique
from autofit.setup.blocks import repeated_blocks
from autofit.techniques import all_techniques, settle, technique_named
from autofit.techniques.lora_rank import output_head
from autofit.training.build import build
from autofit.training.loop import accumulate, train_step, update

EFFECTIVE_BATCH = 4
WORKLOADS = {
    "llama": tiny.llama_workload(EFFECTIVE_BATCH),
    "plain module": tiny.transformer_workload(EFFECTIVE_BATCH),
}
# What stands for the values of knobs that take any number.
NUMBERS: dict[str, tuple[Value, ...]] = {
    "micro_batch_size": (1, 2, 4),
    "gradient_accumulation_steps": (1, 2, 4),
    "lora_rank": (1, 4, 8),
}
# What a value needs beside it to mean anything.
BESIDE: dict[str, Callable[[Value], dict[str, Value]]] = {
    "lora_targets": lambda value: {"lora_rank": 4} if value else {},
    "gradient_accumulation_steps": lambda value: {"micro_batch_size": EFFECTIVE_BATCH // value} if value else {},
}


def values_of(technique: Technique) -> tuple[Value, ...]:
    """Every value, `off` first."""
    rest = technique.values or NUMBERS[technique.name]
    return (technique.off, *(value for value in rest if value != technique.off))


CASES = [(technique.name, value) for technique in all_techniques() for value in values_of(technique)]
CHANGES = [(name, value) for name, value in CASES if value != technique_named(name).off]
EXACT = [(name, value) for name, value in CHANGES if technique_named(name).exact(value, WORKLOADS["llama"])]
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
every_value = pytest.mark.parametrize(("name", "value"), CASES)
every_change = pytest.mark.parametrize(("name", "value"), CHANGES)


def knobs(name: str, value: Value) -> dict[str, Value]:
    """The value and what it needs beside it."""
    return {**BESIDE.get(name, lambda _: {})(value), name: value}


def living(workload: Workload) -> nn.Module:
    """The workload's model with the same real weights every time."""
    torch.manual_seed(0)
    return workload.model()


def built(workload: Workload, config: dict[str, Value], *, lr: float = 1e-3) -> Setup:
    """A run that trains a living model."""
    return build(workload, config, tiny.CPU, model=living(workload), hyperparameters=Hyperparameters(lr=lr))


@dataclass
class Seen:
    """The loss, the gradients and the weights of one step of plain PyTorch."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def plain_step(workload: Workload) -> Seen:
    """One step as one writes it by hand: the whole batch, fp32, AdamW."""
    model = living(workload).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    output = model(**workload.batch(EFFECTIVE_BATCH))
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters()}
    optimizer.step()
    return Seen(loss.detach(), gradients, {key: each.detach() for key, each in model.named_parameters()})


def gradients_of(setup: Setup) -> dict[str, torch.Tensor]:
    return {key: each.grad.clone() for key, each in setup.trainable()}


@every_workload
def test_with_every_knob_off_nothing_is_changed(workload: Workload) -> None:
    plain = plain_step(workload)
    setup = built(workload, {})
    loss = accumulate(setup, workload.batch(EFFECTIVE_BATCH))
    gradients = gradients_of(setup)
    update(setup)
    assert torch.equal(loss, plain.loss)
    assert gradients.keys() == plain.gradients.keys()
    for key, weight in setup.model.named_parameters():
        assert torch.equal(gradients[key], plain.gradients[key]), key
        assert torch.equal(weight, plain.weights[key]), key
    assert not (setup.forward_contexts or setup.step_contexts or setup.scaler or setup.warnings)


@pytest.mark.parametrize("technique", all_techniques(), ids=lambda technique: technique.name)
def test_off_is_what_an_absent_knob_means(technique: Technique) -> None:
    workload = WORKLOADS["plain module"]
    assert technique.accepts(technique.off, tiny.CPU)
    assert technique.exact(technique.off, workload)
    assert settle({technique.name: technique.off}, workload, tiny.CPU) == settle({}, workload, tiny.CPU)


@every_workload
@pytest.mark.parametrize(("name", "value"), EXACT)
def test_an_exact_value_is_the_same_mathematics(name: str, value: Value, workload: Workload) -> None:
    plain = plain_step(workload)
    setup = built(workload, knobs(name, value))
    loss = accumulate(setup, workload.batch(EFFECTIVE_BATCH))
    gradients = gradients_of(setup)
    update(setup)
    torch.testing.assert_close(loss, plain.loss, rtol=1e-5, atol=1e-6)
    for key, weight in setup.model.named_parameters():
        torch.testing.assert_close(gradients[key], plain.gradients[key], rtol=1e-3, atol=1e-6)
        # Adam divides a gradient by its own size, so that of one that is nothing but rounding only the sign is left.
        clear = plain.gradients[key].abs() > 1e-4
        torch.testing.assert_close(weight.detach()[clear], plain.weights[key][clear], rtol=1e-4, atol=1e-5)


@every_workload
@every_value
def test_every_trainable_parameter_is_stepped_exactly_once(name: str, value: Value, workload: Workload) -> None:
    setup = build(workload, knobs(name, value), tiny.CPU, hyperparameters=Hyperparameters(lr=1e-2))
    assert setup.optimizer is not None
    trainable = {id(parameter): key for key, parameter in setup.trainable()}
    grouped = Counter(id(parameter) for group in setup.optimizer.param_groups for parameter in group["params"])
    assert grouped == Counter(trainable.keys())
    before = {key: parameter.detach().clone() for key, parameter in setup.model.named_parameters()}
    step_until_not_skipped(setup)
    for key, parameter in setup.model.named_parameters():
        changed = not torch.equal(parameter, before[key])
        assert changed == parameter.requires_grad, key
        state = setup.optimizer.state.get(parameter, {})
        assert int(state.get("step", 1)) == 1, key


def step_until_not_skipped(setup: Setup) -> None:
    """One step that counts: a loss scaler skips some before."""
    for _ in range(30):
        accumulate(setup, setup.workload.batch(EFFECTIVE_BATCH))
        if update(setup):
            return
    pytest.fail("every step was skipped")


@every_workload
@every_value
def test_two_steps_train_with_a_finite_loss(name: str, value: Value, workload: Workload) -> None:
    setup = built(workload, knobs(name, value), lr=1e-2)
    batch = workload.batch(EFFECTIVE_BATCH)
    before = accumulate(setup, batch)
    setup.optimizer.zero_grad()
    for _ in range(2):
        assert train_step(setup, batch).isfinite()
    if setup.scaler:  # which may have skipped them
        step_until_not_skipped(setup)
        step_until_not_skipped(setup)
    assert accumulate(setup, batch) < before


@every_value
def test_its_config_comes_back_from_yaml(name: str, value: Value) -> None:
    config = settle(knobs(name, value), WORKLOADS["llama"], tiny.CPU)
    assert config[name] == value or value is None
    read = Config(parse(dump(dict(config)), "the test"))
    assert read == config
    assert read.key == config.key
    assert settle(read, WORKLOADS["llama"], tiny.CPU) == config


# How each value is seen to take effect. A library call that silently does nothing must fail here.


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
    """One optimizer step, watched."""
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
        tracker.see_module(setup.model)
        trace.loss = float(accumulate(setup, batch))
        trace.peak_bytes = tracker.peak
        update(setup)
    for hook in hooks:
        hook.remove()
    return trace


@dataclass
class Effect:
    """A value's run beside the run of the same config with that knob off."""

    value: Any
    setup: Setup
    trace: Trace
    off: Setup
    off_trace: Trace


def dtypes_of(parameters: Any) -> set[torch.dtype]:
    return {parameter.dtype for parameter in parameters}


def sees_precision(effect: Effect) -> None:
    low = torch.float16 if effect.value == "fp16-mixed" else torch.bfloat16
    mixed = effect.value.endswith("-mixed")
    assert dtypes_of(effect.setup.model.parameters()) == {torch.float32 if mixed else low}
    assert effect.trace.dtypes("aten.mm", "aten.addmm", "aten.bmm", "scaled_dot_product_flash") == {low}
    assert effect.off_trace.dtypes("aten.mm", "aten.addmm", "aten.bmm", "scaled_dot_product_flash") == {torch.float32}
    assert effect.trace.loss != effect.off_trace.loss
    assert (effect.setup.scaler is not None) == (effect.value == "fp16-mixed")
    if effect.value != "fp16-mixed":  # whose first steps are skipped
        states = {
            state.dtype for each in effect.setup.optimizer.state.values() for state in each.values() if state.dim()
        }
        assert states == {torch.float32 if mixed else low}
    adapted = built(effect.setup.workload, {"precision": effect.value, "lora_rank": 4})
    assert dtypes_of(p for p in adapted.model.parameters() if not p.requires_grad) == {low}
    assert dtypes_of(p for p in adapted.model.parameters() if p.requires_grad) == {torch.float32 if mixed else low}


def sees_checkpointing(effect: Effect) -> None:
    for setup, trace, times in ((effect.setup, effect.trace, 2), (effect.off, effect.off_trace, 1)):
        blocks = repeated_blocks(setup.model)
        assert len(blocks) >= 2
        assert [trace.calls[next(block.children())] for block in blocks] == [times] * len(blocks)
        assert [trace.calls[block] for block in blocks] == [1] * len(blocks)
    assert effect.trace.peak_bytes < effect.off_trace.peak_bytes


def sees_attention(effect: Effect) -> None:
    assert effect.off_trace.ran("scaled_dot_product")
    assert not effect.trace.ran("scaled_dot_product")
    assert effect.trace.ran("softmax")


def sees_micro_batches(effect: Effect) -> None:
    assert effect.trace.samples == [effect.value] * (EFFECTIVE_BATCH // effect.value)
    assert effect.off_trace.samples == [EFFECTIVE_BATCH]


def sees_accumulation(effect: Effect) -> None:
    assert len(effect.trace.samples) == effect.value


def sees_optimizer(effect: Effect) -> None:
    from bitsandbytes.optim import AdamW8bit

    optimizer, ran = effect.setup.optimizer, effect.trace.ran
    kinds = {"adamw-foreach": torch.optim.AdamW, "adamw-8bit": AdamW8bit, "sgd": torch.optim.SGD}
    assert type(optimizer) is kinds[effect.value]
    assert effect.off_trace.ran("_fused_adamw_")
    assert not ran("_fused_adamw_")
    if effect.value == "adamw-foreach":
        assert ran("_foreach_addcdiv_")
    elif effect.value == "sgd":
        assert not optimizer.state
    else:
        sizes = {(p.numel() >= 4096, optimizer.state[p]["state1"].dtype) for _, p in effect.setup.trainable()}
        assert sizes == {(True, torch.uint8), (False, torch.float32)}
        assert {optimizer.state[p]["state2"].numel() - p.numel() for _, p in effect.setup.trainable()} == {0}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}


def sees_adapters(effect: Effect, rank: int, chosen: Callable[[str, nn.Linear], bool]) -> None:
    """Adapters of that rank beside the chosen linear layers, all else frozen and still."""
    targets = {name: each for name, each in linears(effect.off.model).items() if chosen(name, each)}
    expected = sum(rank * (each.in_features + each.out_features) for each in targets.values())
    trainable = effect.setup.trainable()
    assert sum(parameter.numel() for _, parameter in trainable) == expected
    assert {key.partition(".lora_")[0] for key, _ in trainable} == set(targets)
    before = living(effect.setup.workload).state_dict()
    after = {key.replace("base_layer.", ""): each for key, each in effect.setup.model.state_dict().items()}
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert all(parameter.any() for key, parameter in trainable if "lora_B" in key)  # 0 until it was trained


def sees_lora_rank(effect: Effect) -> None:
    head = output_head(effect.off.model)
    sees_adapters(effect, effect.value, lambda name, each: each is not head)
    assert len(effect.off.trainable()) == len(list(effect.off.model.parameters()))


def sees_lora_targets(effect: Effect) -> None:
    head = output_head(effect.off.model)
    chosen: dict[str, Callable[[str, nn.Linear], bool]] = {
        "attention": lambda name, each: "attn" in name,
        "all-linear": lambda name, each: each is not head,
        "all-linear+head": lambda name, each: True,
    }
    sees_adapters(effect, 4, chosen[effect.value])


EFFECTS: dict[str, Callable[[Effect], None]] = {
    "precision": sees_precision,
    "activation_checkpointing": sees_checkpointing,
    "attention": sees_attention,
    "micro_batch_size": sees_micro_batches,
    "gradient_accumulation_steps": sees_accumulation,
    "optimizer": sees_optimizer,
    "lora_rank": sees_lora_rank,
    "lora_targets": sees_lora_targets,
}


@every_workload
@every_change
def test_it_takes_effect(name: str, value: Value, workload: Workload) -> None:
    assert name in EFFECTS, f"show in EFFECTS how one sees that {name} takes effect"
    setup, off = built(workload, knobs(name, value)), built(workload, {})
    assert setup.config[name] == value
    EFFECTS[name](Effect(value, setup, traced_step(setup), off, traced_step(off)))


def test_the_attention_targets_are_a_part_of_all_linear_and_that_of_the_head_too() -> None:
    workload = WORKLOADS["llama"]
    trained = [
        {key for key, _ in built(workload, {"lora_rank": 4, "lora_targets": targets}).trainable()}
        for targets in technique_named("lora_targets").values
    ]
    assert trained[0] < trained[1] < trained[2]
