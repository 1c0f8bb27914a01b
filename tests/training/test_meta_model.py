"""Skeletons hold a model's structure and no weights; weights come into being once, where and how the run needs them."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from autofit.core.errors import InputError
from autofit.core.workload import Workload
from autofit.hardware.tracker import StorageTracker
from autofit.setup import Setup
from autofit.training.build import build
from autofit.training.meta_model import materialize, meta_copy, meta_model_from, parameters_on_meta
from tests import tiny


class Tied(nn.Module):
    """Weights that are tied in both ways people do it, and a buffer that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight  # read back from the module: already on meta
        shared = nn.Parameter(torch.ones(8))
        self.scale, self.shift = shared, shared  # the same object registered twice
        self.register_buffer("positions", torch.arange(10))
        self.register_buffer("hidden", torch.ones(3), persistent=False)


def devices(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    model = meta_model_from(Tied)
    assert devices(model) == {"meta"}
    assert torch.equal(model.positions, torch.arange(10))
    assert torch.equal(model.hidden, torch.ones(3))


def test_ties_are_kept_however_they_were_tied() -> None:
    model = meta_model_from(Tied)
    assert model.head.weight is model.embed.weight
    assert model.scale is model.shift
    assert len(list(model.parameters())) == len(list(Tied().parameters())) == 2


def test_two_parameters_of_one_shape_are_not_one() -> None:
    model = meta_model_from(lambda: nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    assert len(list(model.parameters())) == 4


def test_frozen_numbers_are_constants() -> None:
    def factory() -> nn.Module:
        model = nn.Linear(3, 3)
        # what D-FINE divides by
        model.scale = nn.Parameter(torch.tensor([4.0]), requires_grad=False)
        return model

    setup = build(
        Workload(factory, lambda n: torch.ones(n, 3), effective_batch_size=1), {}, tiny.CPU
    )
    assert setup.model.scale.tolist() == [4.0]


def test_what_is_frozen_stays_frozen() -> None:
    def factory() -> nn.Module:
        model = nn.Linear(3, 3)
        model.weight.requires_grad_(False)
        model.register_parameter("extra", nn.Parameter(torch.ones(2), requires_grad=False))
        return model

    assert {name: p.requires_grad for name, p in meta_model_from(factory).named_parameters()} == {
        "weight": False,
        "bias": True,
        "extra": False,
    }


def test_a_skeleton_takes_the_memory_of_one_layer_at_a_time() -> None:
    """Each layer's weights exist only until they are registered."""
    depth, layer = 20, nn.Linear(100, 100)
    with StorageTracker() as tracker:
        model = meta_model_from(lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(depth))))
    assert tracker.live == 0
    assert tracker.peak <= sum(parameter.nbytes for parameter in layer.parameters())
    assert len(model) == depth


def test_modules_made_afterwards_are_real_again() -> None:
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        1 / 0  # noqa: B018
    assert devices(nn.Linear(2, 2)) == {"cpu"}


@pytest.mark.parametrize(
    "look",
    [
        lambda weight: float(weight.detach().sum()),
        lambda weight: weight.tolist(),
        lambda weight: weight.detach().numpy(),
        lambda weight: np.asarray(weight.detach()),
        lambda weight: weight.nonzero(),
        lambda weight: bool(weight.sum() > 0),
        lambda weight: (
            weight.data.copy_(torch.ones(3, 3)).detach().add(torch.ones(3, 3)).max().item()
        ),
    ],
)
def test_code_that_needs_values_gets_real_weights(look: Callable[[torch.Tensor], object]) -> None:
    def factory() -> nn.Module:
        model = nn.Linear(3, 3)
        look(model.weight)
        return model

    assert devices(meta_model_from(factory)) == {"cpu"}


@pytest.mark.parametrize("made", [None, [1], nn.Linear, {"model": nn.Linear(1, 1)}])
def test_a_factory_must_make_a_module(made: object) -> None:
    def factory() -> object:
        return made

    place = rf"{__file__}:{factory.__code__.co_firstlineno}"
    with pytest.raises(
        InputError, match=rf"the model factory \(at {place}\) returned a .*, not an nn\.Module\."
    ):
        meta_model_from(factory)


# The skeleton of a living model.


def living() -> nn.Module:
    torch.manual_seed(0)
    return tiny.ConvNet()


def test_a_living_model_is_copied_without_its_weights() -> None:
    model = living()
    skeleton = meta_copy(model)
    assert type(skeleton) is type(model)
    assert devices(skeleton) == {"meta"}
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    assert {
        name: (p.shape, p.dtype, p.requires_grad) for name, p in skeleton.named_parameters()
    } == shapes
    for name, buffer in model.named_buffers():
        assert torch.equal(skeleton.get_buffer(name), buffer)


def test_the_living_model_is_not_touched() -> None:
    model = living()
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    before = {name: (p, p.data_ptr(), p.grad, p.clone()) for name, p in model.named_parameters()}
    buffers = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    skeleton = meta_copy(model)
    for buffer in skeleton.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        same, pointer, grad, values = before[name]
        assert parameter is same
        assert parameter.data_ptr() == pointer
        assert parameter.grad is grad
        assert torch.equal(parameter, values)
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == buffers
    assert any(buffer.any() for buffer in model.buffers())


def test_it_takes_no_more_memory_than_the_buffers() -> None:
    model = living()
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    with StorageTracker() as tracker:
        tracker.see([*model.parameters(), *model.buffers()])
        before = tracker.live
        skeleton = meta_copy(model)
        added = tracker.live - before
    assert added == sum(buffer.nbytes for buffer in skeleton.buffers())


def test_ties_and_frozen_weights_of_a_living_model_are_kept() -> None:
    model = Tied()
    model.embed.weight.requires_grad_(False)
    skeleton = meta_copy(model)
    assert skeleton.head.weight is skeleton.embed.weight
    assert skeleton.scale is skeleton.shift
    assert not skeleton.head.weight.requires_grad


def test_a_skeleton_trains_like_the_model_it_was_taken_from() -> None:
    workload = tiny.transformer_workload()
    skeleton = meta_copy(workload.model())
    setup = build(workload, {"activation_checkpointing": "full"}, tiny.CPU, model=skeleton)
    loss = setup.model(**workload.batch(2))
    loss.backward()
    assert loss.isfinite()


# Weights coming into being.


def bare(
    model: nn.Module, trainable: torch.dtype | None = None, frozen: torch.dtype | None = None
) -> Setup:
    setup = build(tiny.mlp_workload(), {}, tiny.CPU)
    setup.model, setup.weights.trainable_dtype, setup.weights.frozen_dtype = (
        model,
        trainable,
        frozen,
    )
    return setup


def test_each_weight_gets_the_dtype_of_its_role() -> None:
    model = meta_model_from(Tied)
    model.scale.requires_grad_(False)
    model.register_parameter(
        "codes", nn.Parameter(torch.zeros(4, dtype=torch.uint8, device="meta"), requires_grad=False)
    )
    materialize(bare(model, trainable=torch.float32, frozen=torch.bfloat16))
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        "embed.weight": torch.float32,
        "scale": torch.bfloat16,
        "codes": torch.uint8,
    }
    assert devices(model) == {"cpu"}
    assert model.head.weight is model.embed.weight
    assert model.positions.dtype == torch.int64


def test_without_a_plan_dtypes_stay() -> None:
    model = meta_model_from(lambda: nn.Linear(2, 2, dtype=torch.float64))
    materialize(bare(model))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_the_weights_are_finite_and_of_the_usual_scale() -> None:
    model = meta_model_from(tiny.Transformer)
    materialize(bare(model))
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            assert 0.01 < float(parameter.detach().std()) < 0.03, name
        else:
            assert parameter.eq(1 if name.endswith("weight") else 0).all(), name


def test_large_weights_repeat_what_was_drawn_but_no_row_is_another_s() -> None:
    model = meta_model_from(lambda: nn.Linear(1024, 1024, bias=False))
    materialize(bare(model))
    assert float(model.weight.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert len(model.weight.detach().unique(dim=0)) == 1024


def test_buffers_that_are_made_of_weights_get_values_of_their_own() -> None:
    """What spectral_norm knows of a weight's largest singular value."""
    model = lambda: nn.Sequential(  # noqa: E731
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 1)
    )
    workload = Workload(model, lambda n: {"input": torch.ones(n, 6)}, effective_batch_size=2)
    setup = build(workload, {}, tiny.CPU)
    assert {each.device.type for each in setup.model.buffers()} == {"cpu"}
    loss = setup.model(torch.ones(2, 6)).square().mean()
    loss.backward()
    assert loss > 0
    assert all(
        each.grad is not None and each.grad.isfinite().all() for each in setup.model.parameters()
    )


def test_the_same_seed_makes_the_same_weights_and_draws_nothing_from_the_user() -> None:
    state = torch.get_rng_state()
    models = [meta_model_from(tiny.MLP) for _ in range(2)]
    torch.set_rng_state(state)
    for model in models:
        materialize(bare(model))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_memory_is_taken_once_and_in_the_final_dtype() -> None:
    model = meta_model_from(tiny.MLP)
    setup = bare(model, trainable=torch.bfloat16)
    with StorageTracker() as tracker:
        materialize(setup)
    assert (
        tracker.peak
        == tracker.live
        == 2 * sum(parameter.numel() for parameter in model.parameters())
    )


def test_living_parameters_keep_their_identity_and_their_values() -> None:
    model = living()
    original, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    optimizer_of_the_users = torch.optim.SGD(model.parameters(), lr=1)
    materialize(bare(model, trainable=torch.bfloat16))
    for name, parameter in model.named_parameters():
        assert parameter is original[name]
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.detach(), values[name].bfloat16())
    assert {p.dtype for group in optimizer_of_the_users.param_groups for p in group["params"]} == {
        torch.bfloat16
    }


def test_living_weights_in_the_right_dtype_are_not_copied() -> None:
    model = living()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    materialize(bare(model, trainable=torch.float32))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
