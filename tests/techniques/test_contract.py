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
    ON_ONE_DEVICE,
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

CASES = [(technique.name, value) for technique in ON_ONE_DEVICE for value in values_of(technique)]
REFUSED = [(name, value) for name, value in CASES if reason_against(name, value)]
WORKING = [case for case in CASES if case not in REFUSED]
CHANGES = [(name, value) for name, value in WORKING if value != technique_named(name).off]
EXACT = [
    (name, value)
    for name, value in CHANGES
    if technique_named(name).exact(value, WORKLOADS["llama"])
    and (name != "compile" or (name, value) not in ALIKE)
]
every_change = pytest.mark.parametrize(("name", "value"), CHANGES)


LR = 1e-2


@dataclass
class Seen:
    """The loss, the gradients and the weights of one step."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def plain_step(workload: Workload) -> Seen:
    """One step as one writes it by hand: the whole batch, fp32, AdamW."""
    model = living(workload).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    output = model(**workload.batch(EFFECTIVE_BATCH))
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    gradients = {key: each.grad.clone() for key, each in model.named_parameters()}
    optimizer.step()
    return Seen(
        loss.detach(), gradients, {key: each.detach() for key, each in model.named_parameters()}
    )


def steps_every_trainable_parameter_exactly_once(setup: Setup) -> Seen:
    """The first step; where the backward has applied the gradients already, none are left to see."""
    assert setup.optimizer is not None
    trainable = {id(parameter): key for key, parameter in setup.trainable()}
    grouped = Counter(
        id(parameter) for group in setup.optimizer.param_groups for parameter in group["params"]
    )
    assert grouped == Counter(trainable.keys())
    before = {key: parameter.detach().clone() for key, parameter in setup.model.named_parameters()}
    seen = step_until_not_skipped(setup)
    for key, parameter in setup.model.named_parameters():
        changed = not torch.equal(parameter, before[key])
        assert changed == parameter.requires_grad, key
        state = setup.optimizer.state.get(parameter, {})
        assert int(state.get("step", 1)) == 1, key
    return seen


def goes_on_with_a_finite_loss_that_falls(setup: Setup, first: torch.Tensor) -> None:
    """The second step, and the loss that it leaves."""
    batch = setup.workload.batch(EFFECTIVE_BATCH)
    assert train_step(setup, batch).isfinite()
    if setup.scaler:  # which may have skipped it
        step_until_not_skipped(setup)
    assert accumulate(setup, batch) < first


def step_until_not_skipped(setup: Setup) -> Seen:
    """One step that counts: a loss scaler skips some before."""
    for _ in range(30):
        loss = accumulate(setup, setup.workload.batch(EFFECTIVE_BATCH))
        assert loss.isfinite()
        gradients = {
            key: each.grad.clone() for key, each in setup.trainable() if each.grad is not None
        }
        if update(setup):
            weights = {key: each.detach().clone() for key, each in setup.model.named_parameters()}
            return Seen(loss, gradients, weights)
    return pytest.fail("every step was skipped")


@every_workload
def test_with_every_knob_off_nothing_is_changed(workload: Workload) -> None:
    plain = plain_step(workload)
    setup = built(workload, {}, lr=LR)
    seen = steps_every_trainable_parameter_exactly_once(setup)
    assert torch.equal(seen.loss, plain.loss)
    assert seen.gradients.keys() == plain.gradients.keys()
    for key, weight in seen.weights.items():
        assert torch.equal(seen.gradients[key], plain.gradients[key]), key
        assert torch.equal(weight, plain.weights[key]), key
    assert not (setup.forward_contexts or setup.scaler or setup.warnings)
    assert len(setup.step_contexts) == hasattr(setup.model, "config"), (
        "that which keeps caches empty"
    )
    goes_on_with_a_finite_loss_that_falls(setup, seen.loss)


@pytest.mark.parametrize("technique", all_techniques(), ids=lambda technique: technique.name)
def test_off_is_what_an_absent_knob_means(technique: Technique) -> None:
    workload = WORKLOADS["plain module"]
    assert technique.accepts(technique.off, tiny.CPU)
    assert technique.exact(technique.off, workload)
    assert canonicalize({technique.name: technique.off}, workload, tiny.CPU) == canonicalize(
        {}, workload, tiny.CPU
    )


@every_workload
@pytest.mark.parametrize(("name", "value"), EXACT)
def test_an_exact_value_is_the_same_mathematics_and_trains(
    name: str, value: Value, workload: Workload
) -> None:
    plain = plain_step(workload)
    setup = built(workload, knobs(name, value), lr=LR)
    seen = steps_every_trainable_parameter_exactly_once(setup)
    assert seen.gradients or setup.stepped_in_backward
    torch.testing.assert_close(seen.loss, plain.loss, rtol=1e-5, atol=1e-6)
    assert seen.weights.keys() == plain.weights.keys()
    for key, gradient in seen.gradients.items():
        torch.testing.assert_close(gradient, plain.gradients[key], rtol=1e-3, atol=1e-6)
    for key, weight in seen.weights.items():
        # Adam divides a gradient by its own size, so that of one that is nothing but rounding only the sign is left.
        clear = plain.gradients[key].abs() > 1e-4
        torch.testing.assert_close(weight[clear], plain.weights[key][clear], rtol=1e-4, atol=1e-5)
    goes_on_with_a_finite_loss_that_falls(setup, seen.loss)
    setup.close()


@every_workload
@pytest.mark.parametrize(
    ("name", "value"), [case for case in CHANGES if case not in EXACT and case not in ALIKE]
)
def test_any_other_value_trains(name: str, value: Value, workload: Workload) -> None:
    """From weights that build makes: it fills adapters in, too, half of which begin as zeros in a model it is given.

    With an alpha of 32 beside the small ranks of these models, steps of this rate would be far too long.
    """
    config = knobs(name, value)
    if config.get("lora_rank"):
        config = {"lora_alpha": 2 * int(config["lora_rank"] or 0), **config}
    try:
        setup = build(workload, config, tiny.CPU, hyperparameters=Hyperparameters(lr=LR))
    except RefusedError as refused:
        pytest.skip(str(refused))
    seen = steps_every_trainable_parameter_exactly_once(setup)
    goes_on_with_a_finite_loss_that_falls(setup, seen.loss)
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
def test_what_cannot_run_here_is_refused_with_a_sentence_and_the_remedy(
    name: str, value: Value
) -> None:
    reason = reason_against(name, value)
    assert re.match(rf"{name}: \w.*; .*\.$|{name}: \w.*\. \w.*\.$", reason), reason
    for workload in WORKLOADS.values():
        with pytest.raises(RefusedError, match=re.escape(reason)):
            build(workload, knobs(name, value), tiny.CPU)


@pytest.mark.gpu
@every_workload
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_needs_a_card_keeps_the_contract_there(
    name: str, value: Value, workload: Workload
) -> None:
    """Beside bf16 where it needs a low format; its own test file has a test marked gpu that shows its effect."""
    hardware = detect("cuda")
    chosen = knobs(name, value)
    formats: list[dict[str, Value]] = [{}, {"precision": "bf16"}]
    reasons = [
        refuse(canonicalize({**beside, **chosen}, workload, hardware), workload, hardware)
        for beside in formats
    ]
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
            workload,
            config,
            detect("cuda"),
            model=living(workload),
            hyperparameters=Hyperparameters(lr=1e-2),
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
