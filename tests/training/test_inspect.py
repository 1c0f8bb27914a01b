"""One look at a workload: what its model is made of, whether its loss splits, and what its author should mend."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autofit.core.errors import InputError
from autofit.core.hardware import GIB
from autofit.core.workload import EACH, Count, Traits, Workload
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.training.build import build
from autofit.training.inspect import Prover, blamed_on, inspect_workload, try_loss
from autofit.training.workload import training_workload
from tests import tiny


def look(workload: Workload, budget_bytes: int = GIB) -> Traits:
    return inspect_workload(workload, tiny.CPU, budget_bytes)


# What models are made of.


def test_a_plain_transformer() -> None:
    traits = look(tiny.transformer_workload())
    assert traits == Traits(
        parameters=sum(parameter.numel() for parameter in tiny.Transformer().parameters()),
        blocks=3,
        linears=3 * 4 + 1,
        adapter_parameters=3 * 32 * (4 + 2 + 5 + 5) + 32 + 48,
        attention=True,
        sdpa=True,
        batch_norm=False,
        dropout=False,
        splits=True,
        count=Count("unequal", ("targets",)),
        notes=(),
    )


def test_workloads_are_told_apart_where_they_can_be() -> None:
    told = [
        look(each()).fingerprint
        for each in (tiny.mlp_workload, tiny.mlp_workload, tiny.transformer_workload)
    ]
    assert told[0] == told[1] != told[2]
    assert None not in told

    def endless() -> nn.Module:
        model = tiny.MLP()
        model.odd = {}
        model.odd["itself"] = model.odd
        return model

    assert look(replace(tiny.mlp_workload(), model=endless)).fingerprint is None


def test_a_convolutional_network() -> None:
    traits = look(tiny.conv_workload())
    assert (traits.blocks, traits.linears, traits.attention, traits.sdpa) == (3, 1, False, False)
    assert traits.batch_norm
    # tried with the stored statistics, so BatchNorm does not couple the samples
    assert traits.splits


def test_a_network_on_feature_vectors() -> None:
    traits = look(tiny.mlp_workload())
    assert (traits.blocks, traits.linears, traits.attention, traits.sdpa, traits.batch_norm) == (
        4,
        9,
        False,
        False,
        False,
    )
    assert traits.splits


def test_a_transformers_model_is_known_to_split() -> None:
    traits = look(tiny.llama_workload())
    assert (traits.blocks, traits.linears, traits.attention, traits.sdpa) == (
        2,
        2 * 7 + 1,
        True,
        True,
    )
    assert (traits.splits, traits.notes) == (True, ())


def test_the_transposed_layers_of_gpt2_are_linear_layers() -> None:
    config = {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
    }
    source = {"kind": "directory", "path": "x"}
    model = HuggingFaceModel("gpt2", "causal-lm", config, source)
    traits = look(huggingface_workload(model, sequence_length=8, effective_batch_size=2))
    assert (traits.linears, traits.attention, traits.dropout) == (2 * 4 + 1, True, True)


@pytest.mark.parametrize(
    ("layer", "noticed"),
    [(nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (nn.AlphaDropout(0.1), True)],
)
def test_dropout_is_noticed_where_it_drops_something(layer: nn.Module, noticed: bool) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(48, 10), layer)

    assert look(replace(tiny.mlp_workload(), model=model)).dropout is noticed


@pytest.mark.parametrize("fused", [True, False])
def test_fused_attention_is_seen_in_the_forward_and_not_by_a_name(fused: bool) -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(48, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(len(x), 1, 4, 12)
            mixed = (
                functional.scaled_dot_product_attention(x, x, x)
                if fused
                else (x @ x.mT).softmax(-1) @ x
            )
            return self.project(mixed.flatten(1))

    traits = look(replace(tiny.mlp_workload(), model=Mixer))
    assert (traits.sdpa, traits.attention) == (fused, False)


def test_a_model_too_large_to_prove_its_loss_is_not_split() -> None:
    def explode(*_: object) -> None:
        raise AssertionError("tried")

    traits = look(replace(tiny.mlp_workload(), loss=explode), budget_bytes=1000)
    assert not traits.splits
    (note,) = traits.notes
    assert note.startswith("the model is too large to prove that its loss can be split")
    with pytest.raises(InputError, match="tried"):
        look(replace(tiny.mlp_workload(), loss=explode))


def test_a_proof_that_runs_out_of_memory_is_none() -> None:
    def too_much(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    traits = look(replace(tiny.mlp_workload(), loss=too_much))
    assert not traits.splits
    (note,) = traits.notes
    assert note.startswith("the model is too large to prove that its loss can be split")


# Losses; what gradients show of them is tests/training/test_equal_work.py's.


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    """Every other sample of the batch is a negative example."""
    embedded = functional.normalize(model(batch[0]), dim=-1)
    return functional.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def class_weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return functional.cross_entropy(
        outputs, batch[1], weight=torch.linspace(0.1, 5, 10, dtype=outputs.dtype)
    )


@pytest.mark.parametrize("loss", [contrastive, class_weighted])
def test_a_loss_that_is_no_mean_over_what_is_known_cannot_be_split(loss: Callable) -> None:
    traits = look(replace(tiny.mlp_workload(), loss=loss))
    assert not traits.splits
    (note,) = traits.notes
    assert "the loss cannot be split, so the micro-batch stays the whole batch" in note
    assert "count=" in note


def test_what_a_loss_of_ones_own_averages_over_is_said() -> None:
    traits = look(
        replace(tiny.mlp_workload(), loss=lambda model, batch: tiny.classify(model, batch))
    )
    assert traits.count == Count("unequal", (1,))
    assert traits.notes == (
        "the loss is a mean over batch[1] != -100, as gradients of a few samples show.",
    )
    traits = look(replace(tiny.mlp_workload(), loss=summed))
    assert traits.splits
    assert traits.notes == ("the loss is a sum over samples, as gradients of a few samples show.",)


def test_what_the_workload_says_of_its_loss_is_checked() -> None:
    assert look(replace(tiny.mlp_workload(), loss=summed, reduction="sum")).splits
    assert not look(replace(tiny.mlp_workload(), loss=class_weighted, reduction="sum")).splits
    weights = torch.linspace(0.1, 5, 10)
    # The mean runs over the weights of the classes of labels that are not ignored.
    counted = replace(
        tiny.mlp_workload(),
        loss=class_weighted,
        count=lambda batch: float(weights.double()[batch[1][batch[1] >= 0]].sum()),
    )
    assert look(counted).splits
    assert not look(replace(counted, count=lambda batch: len(batch[1]))).splits


def test_noise_of_each_sample_does_not_couple_them() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return tiny.classify(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    assert look(replace(tiny.mlp_workload(), loss=noisy)).splits


def test_a_trial_of_a_loss_takes_each_sample_once_and_counts_no_calls() -> None:
    seen: list[int] = []
    calls = 0

    def logged(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(len(batch[0]))
        return summed(model, batch)

    setup = build(replace(tiny.mlp_workload(8), loss=logged), {}, tiny.CPU)
    try_loss(setup)
    assert seen == [1, 3]
    assert calls == 0


def test_a_loss_that_is_no_number_proves_nothing() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        return tiny.classify(model, batch) * float("nan")

    traits = look(replace(tiny.mlp_workload(), loss=broken))
    assert not traits.splits
    assert "the loss is nan with random weights" in traits.notes[0]


def test_a_batch_of_one_sample_has_nothing_to_split() -> None:
    assert look(replace(tiny.mlp_workload(1), loss=summed)).splits


def test_a_loss_that_needs_more_than_a_few_samples_is_tried_on_all() -> None:
    def largest(model: nn.Module, batch: Any) -> torch.Tensor:
        return (
            functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
            .topk(8)
            .values.mean()
        )

    assert not look(replace(tiny.mlp_workload(8), loss=largest)).splits


def test_no_more_samples_are_asked_for_than_the_batch_has() -> None:
    asked: list[int] = []

    def batch(samples: int) -> Any:
        asked.append(samples)
        return tiny.mlp_workload().batch(samples)

    look(replace(tiny.mlp_workload(3), batch=batch))
    assert max(asked) == 3


def test_routers_of_named_models_are_known_to_couple_samples() -> None:
    assert look(tiny.mixture_workload()).splits
    coupled = look(tiny.mixture_workload(output_router_logits=True))
    assert not coupled.splits
    assert "routers couples the samples" in coupled.notes[-1]


def test_of_a_model_too_large_two_blocks_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = look(tiny.transformer_workload())
    monkeypatch.setattr("autofit.training.inspect._MOST_PARAMETERS", whole.parameters - 1)
    tried: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        tried.append(len(model.blocks))
        return model(*batch) if isinstance(batch, tuple) else model(**batch)

    traits = look(replace(tiny.transformer_workload(), loss=loss))
    assert traits.splits
    assert traits.parameters == whole.parameters
    assert set(tried) == {2}


def test_a_prover_proves_on_copies() -> None:
    model = tiny.MLP()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    prover = Prover.of(tiny.mlp_workload(), model, tiny.CPU)
    assert prover.traits().splits
    assert prover.proof(tiny.mlp_workload().batch(4)).count is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# What its author should mend: one sentence that names the place.


def raises_in_the_model() -> nn.Module:
    raise ValueError("no such\nlayer")  # the place


def wrong_width() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)  # the place

    return Net()


def raises_in_the_batch(samples: int) -> Any:
    return {}["features"]  # the place


def raises_in_the_loss(model: nn.Module, batch: Any) -> Any:
    return functional.cross_entropy(model(batch[0]), batch[0])  # the place


def place_in(function: Callable) -> str:
    """file:line of the line of the function that is marked as the place."""
    with open(__file__, encoding="utf-8") as file:  # noqa: PTH123
        lines = file.read().splitlines()
    start = function.__code__.co_firstlineno
    places = (
        number for number in range(start, len(lines)) if lines[number - 1].endswith("# the place")
    )
    return f"{__file__}:{next(places)}"


@pytest.mark.parametrize(
    ("changes", "beginning", "function"),
    [
        (
            {"model": raises_in_the_model},
            "the model factory raised ValueError: no such layer",
            raises_in_the_model,
        ),
        ({"model": wrong_width}, "the loss raised RuntimeError: mat1 and mat2 shapes", wrong_width),
        (
            {"batch": raises_in_the_batch},
            "the batch factory raised KeyError: 'features'",
            raises_in_the_batch,
        ),
        ({"loss": raises_in_the_loss}, "the loss raised RuntimeError: ", raises_in_the_loss),
    ],
)
def test_what_raises_is_named_with_the_users_own_line(
    changes: dict, beginning: str, function: Callable
) -> None:
    with pytest.raises(InputError) as caught:
        look(replace(tiny.mlp_workload(), **changes))
    assert caught.value.message.startswith(beginning)
    assert f"(at {place_in(function)})" in caught.value.message
    assert "\n" not in str(caught.value)
    assert caught.value.remedy == "Correct it there."


def test_where_all_of_it_is_torchs_own_code_that_is_named() -> None:
    with pytest.raises(InputError, match=r"the model factory raised .*\(at .*linear\.py:\d+\)"):
        look(replace(tiny.mlp_workload(), model=partial(nn.Linear, 48, -1)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: [1]}, "returned a list, not an nn.Module. Return the model itself."),
        (
            {"model": lambda: tiny.MLP().requires_grad_(False)},
            "the model has no trainable parameter. Set requires_grad on what should be trained.",
        ),
        (
            {"batch": lambda n: tiny.mlp_workload().batch(n + 1)},
            "the batch factory was asked for 4 samples and gave 5. batch(n) must give n samples along dim 0",
        ),
        (
            {"batch": lambda n: [1] * n},
            "the batch (a list) holds no tensor with samples along dim 0.",
        ),
        (
            {"batch": lambda n: (torch.ones(n), torch.ones(2))},
            "the tensors of a batch differ in size along dim 0: [2, 4].",
        ),
        (
            {"loss": lambda model, batch: model(batch[0])},
            "the loss must be one number in a tensor, not a tensor of shape",
        ),
        (
            {"loss": None},
            "a batch is a tuple of 2, which MLP.forward(features) does not take, and no loss is given.",
        ),
    ],
)
def test_what_is_not_what_it_should_be(changes: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        look(replace(tiny.mlp_workload(), **changes))
    assert message in str(caught.value)


def test_a_users_error_of_ours_is_passed_on() -> None:
    with pytest.raises(InputError, match=r"^mine\.$"), blamed_on("the loss"):
        raise InputError("mine.")


def test_an_error_without_a_message() -> None:
    with (
        pytest.raises(InputError, match=r"the loss raised RuntimeError \(at "),
        blamed_on("the loss"),
    ):
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit("no"), type("Own", (BaseException,), {})("no")]
)
@pytest.mark.parametrize(
    ("part", "name"), [("model", "model factory"), ("batch", "batch factory"), ("loss", "loss")]
)
def test_not_only_exceptions_are_blamed(part: str, name: str, error: BaseException) -> None:
    def raising(*_: Any) -> Any:
        raise error

    with pytest.raises(InputError, match=f"the {name} raised {type(error).__name__}: {error} "):
        look(replace(tiny.mlp_workload(), **{part: raising}))


def test_ctrl_c_and_running_out_of_memory_are_nobodys_mistake() -> None:
    for error in (KeyboardInterrupt, MemoryError):
        with pytest.raises(error), blamed_on("the loss"):
            raise error


def test_a_mean_over_the_items_of_lists_is_found() -> None:
    """A mean over all boxes is one over samples only where these have as many."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        errors = [
            model(row.unsqueeze(0)).mean() * len(each)
            for row, each in zip(*batch.values(), strict=True)
        ]
        return torch.stack(errors).sum() / sum(len(each) for each in batch["labels"])

    generator = torch.Generator().manual_seed(0)
    boxes = [torch.ones(count, 4) for count in (1, 5, 2, 1, 3, 3, 3, 3)]
    workload = training_workload(
        tiny.MLP(), [{"features": torch.randn(8, 48, generator=generator), "labels": boxes}], loss
    )
    traits = look(workload)
    assert (traits.splits, traits.count) == (True, Count("elements", ("labels", EACH)))


def test_what_devices_can_divide() -> None:
    llama = look(tiny.llama_workload(num_attention_heads=4))
    assert (llama.heads, llama.plan) == (2, True), "4 heads, and 2 of keys and values"
    assert not look(tiny.gpt2_workload()).plan
    assert look(tiny.mlp_workload()).heads == 0
