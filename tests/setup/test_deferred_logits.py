"""Logits that are put off: what is noted of a model's handling of them, what computes them, and what is given back."""

import contextlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import RefusedError
from autofit.setup.deferred_logits import Deferral, DeferredLogits, Pending, loss_of_few_tokens
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.step import train_step
from tests import tiny
from tests.tolerances import LOSS

CHUNKED = {"loss": "chunked"}


def deferred(dtype: torch.dtype = torch.float32) -> DeferredLogits:
    """The logits of 2 samples of 3 tokens, of a vocabulary of 5."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(4, 5).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    return DeferredLogits(Pending(Deferral(head), hidden), (2, 3, 5), dtype)


def real(logits: DeferredLogits) -> torch.Tensor:
    """What the stand-in stands for."""
    return logits.pending.deferral.head(logits.pending.hidden)


def test_what_a_model_does_to_each_logit_is_noted_and_done_to_those_of_some_tokens() -> None:
    stand_in = deferred(torch.bfloat16)
    expected = real(stand_in)

    def cap(logits: torch.Tensor) -> torch.Tensor:
        logits = torch.tanh(2 * logits.contiguous() / torch.tensor(30.0)) * 30.0 - 1
        return (-logits + 0.5).to(torch.float16).float()[..., :4]

    capped = cap(stand_in)
    assert isinstance(capped, DeferredLogits)
    assert capped.pending.deferral.computed == 0
    assert capped.shape == (2, 3, 4)
    assert (capped.dtype, capped.device, capped.ndim) == (torch.float32, torch.device("cpu"), 3)
    assert (capped.size(-1), capped.dim(), capped.numel()) == (4, 3, 24)
    some = capped.pending.of(capped.pending.hidden[1, :2])
    torch.testing.assert_close(some, cap(expected)[1, :2])


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits.view(-1, 5),
        lambda logits: logits.log_softmax(-1),
        lambda logits: logits * torch.arange(5),  # may differ from token to token
        lambda logits: logits * nn.Parameter(torch.tensor(2.0)),  # needs a gradient of its own
        lambda logits: 1.0 - logits,
        lambda logits: logits[0],
        lambda logits: logits[:, 1:],
        lambda logits: logits[:, -1, :],
        lambda logits: logits[..., [0, 2]],
        lambda logits: logits.to("cpu"),
        lambda logits: torch.cat([logits, logits]),
        lambda logits: torch.div(torch.ones(5), logits),
        lambda logits: torch.isfinite(logits).all(),
        lambda logits: logits.detach().numpy().sum(),
    ],
)
def test_whatever_else_uses_them_gets_the_real_ones(use: Any) -> None:
    stand_in = deferred()
    result = use(stand_in)
    assert not isinstance(result, DeferredLogits)
    assert stand_in.pending.deferral.computed >= 1
    torch.testing.assert_close(result, use(real(stand_in)))


def test_a_gradient_reaches_the_head_through_logits_that_were_asked_for() -> None:
    stand_in = deferred()
    (stand_in * 2).sum().backward()
    assert stand_in.pending.deferral.head.weight.grad.abs().sum() > 0


def test_few_tokens_are_one_sample_cut_short_with_every_label_valid() -> None:
    workload = tiny.llama_workload(sequence_length=32)
    with contextlib.closing(build(workload, {}, tiny.CPU)) as setup:
        seen: list[Any] = []
        setup.model.register_forward_pre_hook(
            lambda model, args, kwargs: seen.append(
                (kwargs, model.training, torch.is_grad_enabled())
            ),
            with_kwargs=True,
        )
        batch = workload.batch(1)
        with torch.no_grad():
            setup.model.eval()
            expected = setup.model(**{name: each[:, :16] for name, each in batch.items()}).loss
            setup.model.train()
        assert loss_of_few_tokens(setup, batch) == pytest.approx(float(expected), abs=LOSS)
    kwargs, training, gradients = seen[-1]
    assert {tuple(each.shape) for each in kwargs.values()} == {(1, 16)}
    assert (training, gradients, setup.model.training) == (False, False, True)
    assert kwargs["labels"].min() >= 0


def test_there_is_no_loss_of_few_tokens_of_batches_that_are_no_mappings() -> None:
    with contextlib.closing(build(tiny.mlp_workload(), {}, tiny.CPU)) as setup:
        assert math.isnan(loss_of_few_tokens(setup, setup.workload.batch(1)))


@pytest.mark.parametrize("option", ["num_items_in_batch", "shift_labels"])
def test_what_a_trainer_passes_on_to_the_loss_is_honoured(option: str) -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    batch = workload.batch(4)
    labels = torch.randint(64, batch["labels"].shape, generator=torch.Generator().manual_seed(3))
    batch[option] = torch.tensor(17) if option == "num_items_in_batch" else labels
    expected = model(**batch).loss
    with contextlib.closing(build(workload, CHUNKED, tiny.CPU, model=model)):
        assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_evaluation_generation_and_outputs_without_labels_are_untouched() -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    batch = workload.batch(4)
    with torch.no_grad():
        expected, logits = float(model(**batch).loss), model(**batch).logits
    told = model.generate(
        batch["input_ids"][:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    with contextlib.closing(build(workload, CHUNKED, tiny.CPU, model=model)) as setup:
        assert evaluate(setup, [batch]) == pytest.approx(expected, rel=1e-5)
        assert model.training
        plain = model(input_ids=batch["input_ids"]).logits
        assert type(plain) is torch.Tensor
        torch.testing.assert_close(plain, logits)
        # made when they are asked for
        assert torch.equal(model(**batch).logits[:, -1], logits[:, -1])
        again = model.generate(
            batch["input_ids"][:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        assert torch.equal(again, told)


def test_a_model_is_given_back_as_it_was() -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    before = [dict(vars(module)) for module in model.modules()]
    setup = build(workload, CHUNKED, tiny.CPU, model=model)
    assert "forward" in vars(model.lm_head)
    train_step(setup, workload.batch(4))
    setup.close()
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert model.loss_function.__name__ == "ForCausalLMLoss"


def test_only_where_no_valid_label_is_left_there_is_no_number() -> None:
    workload = tiny.llama_workload()
    batch = workload.batch(4)
    with contextlib.closing(build(workload, CHUNKED, tiny.CPU)) as setup:
        loss = setup.model(**batch | {"labels": torch.full_like(batch["labels"], -100)}).loss
    assert loss.isnan()  # as of the standard loss, whose mean is over nothing


@pytest.mark.parametrize(
    "changed", [{"return_dict": False}, {"labels": None}], ids=["a tuple", "no labels"]
)
def test_a_model_that_gives_no_loss_is_refused(changed: dict[str, Any]) -> None:
    given = tiny.llama_workload()
    workload = replace(given, batch=lambda n: {**given.batch(n), **changed})
    with pytest.raises(
        RefusedError, match=r"the model returns no loss to compare with .*; use loss standard"
    ):
        build(workload, {"loss": "chunked"}, tiny.CPU)
