"""fit trains the user's own model as a loop written by hand would, and gives it back as it came."""

import copy
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autofit
from autofit.api.fit import fit
from autofit.core.config import Config
from autofit.core.errors import InputError, ProbeError
from autofit.core.events import Event, Note
from autofit.training.loop import StepReport
from tests import tiny
from tests.api.fitting import (
    Batch,
    StoppedError,
    assert_same,
    batches,
    contrastive,
    fitted,
    mlp,
    noisy,
    shuffled,
    weights,
)


def test_the_users_own_model_is_trained() -> None:
    model = mlp()
    parameters = list(model.parameters())
    trained = fitted(model, epochs=20)
    assert trained.model is model
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert trained.result is None
    assert trained.evaluations == []
    assert [report.step for report in trained.history] == list(range(1, 61))
    assert {report.samples for report in trained.history} == {8}
    assert trained.history[-1].loss < 0.5 * trained.history[0].loss


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_knobs_it_is_the_loop_written_by_hand_bit_for_bit(decay: float) -> None:
    model = mlp()
    trained = fitted(copy.deepcopy(model), epochs=3, weight_decay=decay)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    losses = []
    for batch in batches() * 3:
        loss = tiny.classify(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert [report.loss for report in trained.history] == losses
    assert_same(weights(trained.model), weights(model))


@pytest.mark.parametrize(
    "knobs",
    [
        {"micro_batch_size": 2},
        {"micro_batch_size": 1, "activation_checkpointing": "full"},
        {"activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_exact_knobs_give_the_same_weights(knobs: dict[str, Any]) -> None:
    plain = fitted(config={"optimizer": "sgd"}, epochs=3, max_grad_norm=0.5)
    other = fitted(config=Config({"optimizer": "sgd", **knobs}), epochs=3, max_grad_norm=0.5)
    assert_same(weights(other.model), weights(plain.model), rtol=1e-5, atol=1e-6)
    for one, two in zip(plain.history, other.history, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-5)


def test_a_ragged_last_batch_is_trained_on_too() -> None:
    loader = DataLoader(
        TensorDataset(*(torch.cat(parts) for parts in zip(*batches(3), strict=True))), batch_size=9
    )
    trained = fitted(loader=loader, config={"micro_batch_size": 3})
    assert [report.samples for report in trained.history] == [9, 9, 6]


def test_the_model_is_given_back_without_wrappers() -> None:
    model = mlp()
    fitted(model, config={"activation_checkpointing": "full", "precision": "bf16"}, steps=1)
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_failure_gives_the_model_back_without_wrappers_too() -> None:
    model = mlp()

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(model, config={"activation_checkpointing": "full"}, callbacks=(stop,))
    assert not any("forward" in vars(module) for module in model.modules())


def test_batch_norm_is_warned_of() -> None:
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3]))]
    for micro_batch, warned in ((2, 1), (4, 0)):
        events: list[Event] = []
        fitted(
            tiny.ConvNet(), loader, config={"micro_batch_size": micro_batch}, listener=events.append
        )
        notes = [event.text for event in events if isinstance(event, Note)]
        assert (
            sum("BatchNorm takes its statistics over micro-batches of 2" in note for note in notes)
            == warned
        )


def test_a_loss_that_couples_samples_is_not_split() -> None:
    with pytest.raises(InputError, match=r"cannot be split.* Set micro_batch_size to 8"):
        fitted(loss=contrastive, config={"micro_batch_size": 4})
    assert len(fitted(loss=contrastive, config={"micro_batch_size": 8}).history) == 3


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 3), ({"epochs": 2}, 6), ({"steps": 2}, 2), ({"steps": 7}, 7)], ids=str
)
def test_length_of_training(given: dict[str, int], steps: int) -> None:
    assert len(fitted(**given).history) == steps


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epochs": 1, "steps": 1}, "epochs and steps both say how long"),
        ({"epochs": 0}, "must be a positive whole number, not 0"),
        ({"steps": -1}, "must be a positive whole number, not -1"),
        ({"steps": 1.5}, r"must be a positive whole number, not 1\.5"),
        ({"steps": True}, "must be a positive whole number, not True"),
    ],
    ids=str,
)
def test_lengths_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fitted(**given)


def test_a_loader_without_a_length_is_counted() -> None:
    def read() -> Iterator[Batch]:
        yield from batches()

    assert len(fitted(loader=read, epochs=2).history) == 6


class Drained:
    """Can be read again, but gives nothing any more."""

    def __init__(self) -> None:
        self.rest = iter(batches())

    def __iter__(self) -> Iterator[Batch]:
        yield from self.rest


@pytest.mark.parametrize("length", [{}, {"steps": 2}], ids=str)
def test_a_loader_that_one_look_used_up(length: dict[str, int]) -> None:
    with pytest.raises(InputError, match="gave no batch: it is empty, or can be read only once"):
        fitted(loader=Drained(), **length)


def test_a_learning_rate_that_nobody_gave_is_told() -> None:
    def told(**given: float) -> list[str]:
        events: list[Event] = []
        trained = fit(
            mlp(),
            batches(),
            loss=tiny.classify,
            config={},
            device="cpu",
            steps=1,
            listener=events.append,
            **given,
        )
        assert [report.lr for report in trained.history] == [given.get("lr", 2e-5)]
        return [event.text for event in events if isinstance(event, Note)]

    assert told() == [
        "lr is not given: the learning rate is 2e-05, as full fine-tuning takes; a model that starts from random "
        "weights takes more."
    ]
    assert told(lr=float("1e-4")) == []


def test_schedules() -> None:
    def rates(**given: Any) -> list[float]:
        return [
            report.lr
            for report in fitted(steps=5, lr=1.0, config={"optimizer": "sgd"}, **given).history
        ]

    assert rates() == [1.0] * 5
    assert rates(schedule="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(schedule="cosine", warmup_steps=1) == pytest.approx(
        [0.5, 1.0, 0.853553, 0.5, 0.146447], abs=1e-5
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": 0}, "learning rate must be positive, not 0"),
        ({"schedule": "exponential"}, "schedule must be one of constant, cosine, linear"),
        ({"max_grad_norm": -1}, "max_grad_norm must be positive"),
        ({"config": {"precison": "bf16"}}, r"unknown knob 'precison'\. Did you mean 'precision'\?"),
        (
            {"config": {"precision": "bf17"}},
            r"unknown value for precision 'bf17'\. Did you mean 'bf16'\?",
        ),
        (
            {"config": {"micro_batch_size": 3}},
            r"micro_batch_size 3 does not divide the effective batch of 8",
        ),
        ({"learning_rate": 1}, r"unknown option 'learning_rate'"),
        ({"devise": "cpu"}, r"unknown option 'devise'\. Did you mean 'device'\?"),
        ({"resume": True}, "to resume, the directory must be named"),
        ({"loader": []}, "the loader is empty"),
        ({"loader": iter(batches())}, "can be read only once"),
        ({"loader": 5}, "the loader must be an iterable of batches, not a int"),
        ({"model": "gpt2"}, "the model must be an nn.Module or the name of one, not a str"),
        (
            {"loss": lambda model, batch: model(batch[0])},
            r"the loss must be one number in a tensor, not a tensor of",
        ),
        ({"loss": lambda model, batch: torch.ones(())}, "the loss needs no gradient"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(next(iter(value))),
)
def test_bad_input_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        fitted(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ProbeError, match="no CUDA device"):
        fitted(device="cuda")


def test_evaluation_after_every_pass_and_at_the_end() -> None:
    held_out = batches(2, 5)
    model = mlp()
    before = float(torch.stack([tiny.classify(model, batch).detach() for batch in held_out]).mean())
    trained = fitted(model, steps=7, eval_loader=held_out, lr=1e-9)
    assert trained.evaluations == [pytest.approx(before, abs=1e-4)] * 3
    assert len(fitted(steps=6, eval_loader=held_out).evaluations) == 2
    assert model.training


def test_callbacks_are_told_of_every_step() -> None:
    seen: list[StepReport] = []
    trained = fitted(epochs=2, callbacks=(seen.append, lambda report: None))
    assert seen == trained.history


def test_every_pass_of_a_shuffling_loader_has_an_order_of_its_own() -> None:
    firsts: list[float] = []

    def remember(model: nn.Module, batch: Batch) -> torch.Tensor:
        firsts.append(float(batch[0][0, 0]))
        return tiny.classify(model, batch)

    fitted(loader=shuffled(), loss=remember, epochs=2)
    trained = firsts[-6:]
    assert trained[:3] != trained[3:]


def test_a_model_comes_back_in_the_format_it_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Config(precision="fp32"), "cpu", None)
    monkeypatch.setattr(
        importlib.import_module("autofit.api.fit"), "_searched", lambda *_, **__: found
    )
    model = noisy().double()  # which no config trains in
    before = weights(model)
    loader = [(features.double(), classes) for features, classes in batches()]
    fitted(model, loader, config=None)
    after = weights(model)
    assert {name: each.dtype for name, each in after.items()} == {
        name: each.dtype for name, each in before.items()
    }
    assert not torch.equal(before["body.0.weight"], after["body.0.weight"])


def test_modules_come_back_in_the_mode_they_came_in() -> None:
    model = noisy().eval()
    model.body[2].train()
    trained = fitted(model, config={"lora_rank": 2})
    assert [module.training for module in model.body] == [False, False, True, False]
    assert not trained.model.training
    model.train()
    model.body[1].eval()

    def stop(report: StepReport) -> None:
        assert not model.body[1].training, "which its user froze"
        raise StoppedError

    with pytest.raises(StoppedError):
        fitted(model, callbacks=(stop,))
    assert [module.training for module in model.body] == [True, False, True, True]


def test_gradients_from_before_have_no_part_in_the_first_step() -> None:
    model, expected = mlp(), fitted(steps=2).history
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert fitted(model, steps=2).history == expected
    assert all(parameter.grad is None for parameter in model.parameters())


class Endless(torch.utils.data.IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        yield from batches(2)


def test_an_iterable_dataset_is_counted_by_reading_it() -> None:
    trained = fitted(loader=DataLoader(Endless(), batch_size=None), epochs=2)
    assert len(trained.history) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": [1]}, "config must be an autofit.Config or a mapping of knobs, not "),
        (
            {"callbacks": print},
            "callbacks must be a tuple of functions, not <built-in function print>",
        ),
        ({"checkpoint_every": 0}, "checkpoint_every must be a whole number from 1, not 0"),
        ({"keep_last": 1.5}, r"keep_last must be a whole number from 1, not 1\.5"),
        ({"callbacks": [3]}, r"callbacks must be a tuple of functions, not \[3\]"),
        ({"callbacks": 3}, "callbacks must be a tuple of functions, not 3"),
        ({"seed": None}, "seed cannot be None"),
        ({"seed": 2**70}, "seed must be a whole number of at most 63 bits"),
        (
            {"model": mlp().requires_grad_(False)},
            r"the model has no trainable parameter\. Set requires_grad",
        ),
        (
            {"eval_loader": iter(batches())},
            "the eval_loader is a list_iterator, which can be read only once",
        ),
        ({"eval_loader": []}, "eval_loader is empty: it gave no batch"),
        (
            {"eval_loader": [torch.ones(2, 48)]},
            "the loss on eval_loader's first sample raised ValueError: not enough",
        ),
        ({"output_dir": Path(__file__) / "x"}, "test_fit.py is a file, not a directory"),
    ],
)
def test_what_could_only_fail_later_is_told_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted(**options)


def test_an_optimizer_is_a_name_or_a_function() -> None:
    def one(**how: Any) -> float:
        return fitted(steps=3, **how).history[-1].loss

    assert one(optimizer="sgd") == one(config={"optimizer": "sgd"}) != one()
    assert one(optimizer=torch.optim.NAdam) != one()
    assert one(
        optimizer=lambda groups: torch.optim.AdamW(groups, weight_decay=0.0)
    ) == pytest.approx(one(), rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            torch.optim.SGD(mlp().parameters(), lr=1),
            "the name of one or a function that makes one, not a SGD",
        ),
        (5, "the name of one or a function that makes one, not a int"),
        ("adam", r"unknown value for optimizer 'adam'\. Did you mean 'adamw'"),
    ],
)
def test_what_is_no_optimizer(optimizer: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fitted(optimizer=optimizer)


def test_without_a_listener_notes_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3]))]
    fitted(tiny.ConvNet(), loader, config={"micro_batch_size": 2})
    of_loss, of_norms = caplog.record_tuples
    assert {of_loss[:2], of_norms[:2]} == {("autofit", logging.WARNING)}
    assert "the loss is a mean over" in of_loss[2]
    assert "BatchNorm takes its statistics" in of_norms[2]


def test_the_model_without_its_adapters() -> None:
    trained = fitted(config={"lora_rank": 2}, steps=2)
    features = batches(1)[0][0]
    plain = trained.merged()
    assert not any("lora_" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(plain(features), trained.model(features), rtol=1e-4, atol=1e-5)


def test_labels_of_a_wrong_shape_are_one_sentence() -> None:
    loader = [(features, classes.float()) for features, classes in batches()]
    with pytest.raises(InputError, match=r"the loss raised RuntimeError: .* Correct it there"):
        fitted(loader=loader)


def test_a_model_that_cannot_be_copied_is_trained_with_a_config() -> None:
    model = mlp()
    model.lock = threading.Lock()
    assert fitted(model, steps=2).history == fitted(steps=2).history
    with pytest.raises(InputError, match="copying the model's structure raised TypeError"):
        fitted(model, config=None)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_around_it(mode: Callable[[], Any]) -> None:
    expected, model, loader = fitted().history, mlp(), batches()
    with mode():
        assert fitted(model, loader).history == expected


def test_a_callback_ends_training_cleanly() -> None:
    trained = fitted(
        steps=20, callbacks=[lambda report: autofit.STOP if report.step == 3 else None]
    )
    assert len(trained.history) == 3
    assert trained.model.training
