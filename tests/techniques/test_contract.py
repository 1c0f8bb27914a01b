"""The contract that every value of every technique keeps, whoever wrote the technique.

A new technique gets all of this for a test file of its own, whose `shows` says how its values are seen to take effect.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.strict_yaml import dump, parse
from autofit.core.workload import Hyperparameters, Workload
from autofit.hardware.device import detect
from autofit.setup import Setup, Technique
from autofit.techniques import all_techniques, canonicalize, refuse, technique_named
from autofit.training.build import build
from autofit.training.step import accumulate, train_step, update
from tests import tiny
from tests.techniques.contract import (
    ALIKE,
    EFFECTIVE_BATCH,
    WORKLOADS,
    Effect,
    built,
    every_workload,
    file_of,
    knobs,
    living,
    reason_against,
    values_of,
    without,
)

CASES = [(technique.name, value) for technique in all_techniques() for value in values_of(technique)]
REFUSED = [(name, value) for name, value in CASES if reason_against(name, value)]
WORKING = [case for case in CASES if case not in REFUSED]
CHANGES = [(name, value) for name, value in WORKING if value != technique_named(name).off]
EXACT = [
    (name, value)
    for name, value in CHANGES
    if technique_named(name).exact(value, WORKLOADS["llama"]) and (name != "compile" or (name, value) not in ALIKE)
]
every_value = pytest.mark.parametrize(("name", "value"), [case for case in WORKING if case not in ALIKE])
every_change = pytest.mark.parametrize(("name", "value"), CHANGES)


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
    """Those that are left after the backward: none where it has applied them already."""
    return {key: each.grad.clone() for key, each in setup.trainable() if each.grad is not None}


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
    assert canonicalize({technique.name: technique.off}, workload, tiny.CPU) == canonicalize({}, workload, tiny.CPU)


@every_workload
@pytest.mark.parametrize(("name", "value"), EXACT)
def test_an_exact_value_is_the_same_mathematics(name: str, value: Value, workload: Workload) -> None:
    plain = plain_step(workload)
    setup = built(workload, knobs(name, value))
    loss = accumulate(setup, workload.batch(EFFECTIVE_BATCH))
    gradients = gradients_of(setup)
    assert gradients or setup.stepped_in_backward
    update(setup)
    torch.testing.assert_close(loss, plain.loss, rtol=1e-5, atol=1e-6)
    weights = dict(setup.model.named_parameters())
    assert weights.keys() == plain.weights.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain.gradients[key], rtol=1e-3, atol=1e-6)
    for key, weight in weights.items():
        # Adam divides a gradient by its own size, so that of one that is nothing but rounding only the sign is left.
        clear = plain.gradients[key].abs() > 1e-4
        torch.testing.assert_close(weight.detach()[clear], plain.weights[key][clear], rtol=1e-4, atol=1e-5)
    setup.close()


@every_workload
@every_value
def test_every_trainable_parameter_is_stepped_exactly_once(name: str, value: Value, workload: Workload) -> None:
    try:
        setup = build(workload, knobs(name, value), tiny.CPU, hyperparameters=Hyperparameters(lr=1e-2))
    except RefusedError as refused:
        pytest.skip(str(refused))
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
    setup.close()


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
    losses = [train_step(setup, batch) for _ in range(2)]
    assert all(loss.isfinite() for loss in losses)
    if setup.scaler:  # which may have skipped them
        step_until_not_skipped(setup)
        step_until_not_skipped(setup)
    assert accumulate(setup, batch) < losses[0]
    setup.close()


@pytest.mark.parametrize(("name", "value"), CASES)
def test_its_config_comes_back_from_yaml(name: str, value: Value) -> None:
    config = canonicalize(knobs(name, value), WORKLOADS["llama"], tiny.CPU)
    assert config[name] == value or value is None
    read = Config(parse(dump(dict(config)), "the test"))
    assert read == config
    assert read.key == config.key
    assert canonicalize(read, WORKLOADS["llama"], tiny.CPU) == config


@every_workload
@every_change
def test_it_takes_effect(name: str, value: Value, workload: Workload) -> None:
    """A library call that silently does nothing must fail here."""
    setup, off = built(workload, knobs(name, value)), built(workload, without(name, value))
    assert setup.config[name] == value
    file_of(name).shows(Effect(value, setup, off))
    setup.close()
    off.close()


@every_change
def test_some_kind_of_model_can_be_trained_with_it(name: str, value: Value) -> None:
    """The tests above skip a kind of model that a technique refuses; it must not refuse them all."""
    reasons = []
    for workload in WORKLOADS.values():
        try:
            build(workload, knobs(name, value), tiny.CPU).close()
        except RefusedError as refused:
            reasons.append(str(refused))
    assert len(reasons) < len(WORKLOADS), reasons


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_run_here_is_refused_with_a_sentence_and_the_remedy(name: str, value: Value) -> None:
    reason = reason_against(name, value)
    assert re.match(rf"{name}: \w.*; .*\.$|{name}: \w.*\. \w.*\.$", reason), reason
    for workload in WORKLOADS.values():
        with pytest.raises(RefusedError, match=re.escape(reason)):
            build(workload, knobs(name, value), tiny.CPU)


@pytest.mark.gpu
@every_workload
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_needs_a_card_keeps_the_contract_there(name: str, value: Value, workload: Workload) -> None:
    """Beside bf16 where it needs a low format; its own test file has a test marked gpu that shows its effect."""
    hardware = detect("cuda")
    chosen = knobs(name, value)
    formats: list[dict[str, Value]] = [{}, {"precision": "bf16"}]
    reasons = [refuse(canonicalize({**beside, **chosen}, workload, hardware), workload, hardware) for beside in formats]
    if None not in reasons:
        pytest.skip(f"{reasons[0]}")
    beside = formats[reasons.index(None)]
    losses = {
        "on": _losses({**beside, **chosen}, workload),
        "off": _losses({**beside, **without(name, value)}, workload),
    }
    assert losses["on"][-1] < losses["on"][0]
    if technique_named(name).exact(value, workload):
        assert losses["on"] == pytest.approx(losses["off"], rel=1e-2 if beside else 1e-3)


def _losses(config: dict[str, Value], workload: Workload) -> list[float]:
    """Of three steps on the card, the first of which moves every trainable parameter once."""
    try:
        setup = build(
            workload, config, detect("cuda"), model=living(workload), hyperparameters=Hyperparameters(lr=1e-2)
        )
    except RefusedError as refused:
        return pytest.skip(str(refused))
    batch = workload.batch(EFFECTIVE_BATCH)
    before = {key: parameter.detach().clone() for key, parameter in setup.trainable()}
    losses = [float(train_step(setup, batch))]
    for key, parameter in setup.trainable():
        assert not torch.equal(parameter, before[key]), key
    losses += [float(train_step(setup, batch)) for _ in range(2)]
    setup.close()
    assert all(map(math.isfinite, losses))
    return losses
