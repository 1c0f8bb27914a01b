"""Without a loss the model's own is taken; where there is none, one sentence says how to give it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from autofit.core.errors import InputError
from autofit.training.default_loss import check_call, check_loss_function, default_loss
from tests import tiny

TRAINED = nn.Parameter(torch.tensor(2.0))
SCALAR, VECTOR = torch.tensor(2.0), torch.ones(4, 10)


class Returning(nn.Module):
    """Returns what it was made with."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.output


BATCH = {"x": VECTOR, "y": VECTOR}


@pytest.mark.parametrize(
    "output", [SCALAR, {"loss": SCALAR}, SimpleNamespace(loss=SCALAR, logits=VECTOR)]
)
@pytest.mark.parametrize("batch", [BATCH, (VECTOR, VECTOR), [VECTOR, VECTOR]])
def test_the_models_own_loss(output: Any, batch: Any) -> None:
    assert default_loss(Returning(output), batch) is SCALAR


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((VECTOR, SCALAR), "Returning returned a tuple of 2, which is no loss, and none is given."),
        (
            {"logits": VECTOR},
            "Returning returned a dict of logits, which is no loss, and none is given.",
        ),
        (
            SimpleNamespace(logits=VECTOR),
            "Returning returned a SimpleNamespace, which is no loss, and none is given.",
        ),
        (
            VECTOR,
            "Returning returned a tensor of shape (4, 10), which is no loss, and none is given.",
        ),
        (2.0, "Returning returned a float, which is no loss, and none is given."),
        (None, "Returning returned a NoneType, which is no loss, and none is given."),
        (SimpleNamespace(loss=None), "Returning computed no loss of the batch."),
    ],
)
def test_what_is_no_loss(output: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        default_loss(Returning(output), BATCH)
    assert caught.value.message == message
    example = 'ass loss=..., for example loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]).'
    assert caught.value.remedy.endswith(example)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            (TRAINED, TRAINED),
            "Returning returned a tuple of 2 losses: autofit trains one loss with one optimizer.",
        ),
        (
            {"fake": VECTOR, "loss_generator": TRAINED, "loss_critic": TRAINED},
            "Returning returned a dict of loss_generator, loss_critic losses: autofit trains one loss",
        ),
    ],
)
def test_several_losses(output: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        default_loss(Returning(output), BATCH)
    assert caught.value.message.startswith(message)
    assert "networks that are trained in turns, as in a GAN" in caught.value.remedy


def test_a_tuple_that_begins_with_a_loss() -> None:
    with pytest.raises(InputError) as caught:
        default_loss(Returning((SCALAR, VECTOR)), BATCH)
    assert (
        caught.value.remedy == "Pass loss=lambda model, batch: model(**batch)[0], if that is one."
    )


@pytest.mark.parametrize(
    ("batch", "told", "example"),
    [
        ((VECTOR, VECTOR), "a tuple of 2", "F.cross_entropy(model(batch[0]), batch[1])"),
        ([VECTOR, VECTOR], "a list of 2", "F.cross_entropy(model(batch[0]), batch[1])"),
        (
            {"x": VECTOR, "y": VECTOR},
            "a dict of x, y",
            'F.cross_entropy(model(batch["x"]), batch["y"])',
        ),
    ],
)
def test_batches_that_the_model_does_not_take(batch: Any, told: str, example: str) -> None:
    with pytest.raises(InputError) as caught:
        check_call(nn.Sequential(nn.Linear(10, 2)), batch)
    assert str(caught.value) == (
        f"a batch is {told}, which Sequential.forward(input) does not take, and no loss is given. "
        f"Pass loss=..., for example loss=lambda model, batch: {example}."
    )


def test_a_tensor_that_is_no_loss_is_its_own_target() -> None:
    with pytest.raises(
        InputError, match=r"loss=lambda model, batch: F\.mse_loss\(model\(batch\), batch\)"
    ):
        default_loss(nn.Linear(10, 10), VECTOR)


def test_models_that_may_take_anything_are_let_through() -> None:
    class Anything(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    hooked = nn.Linear(10, 2)
    hooked.register_forward_pre_hook(lambda module, args: args[:1])
    for model in (Anything(), hooked, tiny.Transformer()):
        check_call(model, (VECTOR, VECTOR))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            nn.CrossEntropyLoss(),
            r"nn\.CrossEntropyLoss\(\) is a function of outputs and targets; a loss is one of \(mo",
        ),
        (
            functional.mse_loss,
            r"Pass loss=lambda model, batch: F\.mse_loss\(model\(batch\[0\]\), batch\[1\]\)\.",
        ),
        ("mse", r"the loss must be a function of \(model, batch\), not 'mse'\. Pass loss="),
    ],
)
def test_what_cannot_be_a_loss(loss: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_loss_function(loss)


def test_what_can_be_a_loss() -> None:
    for loss in (None, tiny.classify, lambda model, batch: SCALAR):
        check_loss_function(loss)


# Columns of a data set that a model does not take.


def rows(**columns: Any) -> dict[str, Any]:
    ids = torch.ones(2, 4, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, **columns}


@pytest.mark.parametrize("column", [["a", "b"], torch.ones(2)], ids=["texts", "tensor"])
def test_a_column_that_clashes_with_the_models_own_names_is_named(column: Any) -> None:
    """transformers hands further arguments on to its loss, where `source` is one of its own."""
    with pytest.raises(InputError) as caught:
        default_loss(tiny.llama()(), rows(source=column))
    assert str(caught.value) == (
        "LlamaForCausalLM.forward does not take source of the batches, and no loss is given. Leave source out "
        '(dataset.remove_columns(["source"]), or in collate_fn), or pass a loss of your own.'
    )


def test_columns_that_a_forward_has_no_argument_for_are_named() -> None:
    class Own(nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features.sum()

    batch = {"features": torch.ones(2), "name": ["a", "b"], "number": torch.ones(2)}
    with pytest.raises(
        InputError, match=r"Own\.forward does not take name and number of the batches"
    ) as caught:
        check_call(Own(), batch)
    assert 'dataset.remove_columns(["name", "number"])' in caught.value.remedy


@pytest.mark.parametrize(
    ("column", "holds"),
    [
        (
            default_collate([{"ids": [1, 2, 3, 4]}] * 2)["ids"],
            "a list of 4 tensors, as DataLoader's own collate_fn",
        ),
        ([[1, 2, 3, 4]] * 2, "lists"),
        (["a text", "another"], "texts"),
    ],
    ids=["collated", "lists", "texts"],
)
def test_lists_in_place_of_tensors_are_named(column: Any, holds: str) -> None:
    with pytest.raises(InputError) as caught:
        default_loss(tiny.llama()(), rows(input_ids=column))
    message = (
        f"LlamaForCausalLM does not take the batches: input_ids should be tensors, not {holds}"
    )
    assert caught.value.message.startswith(message)
    assert 'dataset.set_format("torch"), or a collate_fn' in caught.value.remedy


def test_an_error_of_a_models_own_code_stays_what_it_is() -> None:
    class Own(nn.Module):
        def forward(self, features: Any, **more: Any) -> torch.Tensor:
            raise TypeError("a list is not what I want")

    with pytest.raises(TypeError, match="a list is not what I want"):
        default_loss(Own(), {"features": [torch.ones(2)]})
