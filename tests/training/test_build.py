"""build puts a run together or says why not, and close gives the model back as it was."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.core.errors import InputError, RefusedError
from autofit.core.workload import Traits, Workload
from autofit.setup import Setup
from autofit.techniques import canonicalize
from autofit.training.build import build
from autofit.training.step import train_step
from tests import tiny

TRAITS = Traits(
    parameters=1, blocks=0, linears=0, attention=False, sdpa=False, batch_norm=False, dropout=False
)
EVERYTHING = {
    "precision": "bf16",
    "activation_checkpointing": "full",
    "attention": "eager",
    "micro_batch_size": 2,
    "optimizer": "sgd",
}


def hooks_of(model: nn.Module) -> list[Any]:
    """Everything that hangs on a model's modules beside weights, buffers and children."""
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [
        hook
        for module in model.modules()
        for kind in kinds
        for hook in getattr(module, kind).values()
    ]


def own_attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize(
    "workload", [tiny.llama_workload(), tiny.transformer_workload()], ids=["llama", "plain"]
)
def test_close_gives_the_model_back_without_wrappers_and_hooks(workload: Workload) -> None:
    model = workload.model()
    if hasattr(model, "config"):
        model.config.use_cache = True
    before = own_attributes(model)
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    setup = build(workload, EVERYTHING, tiny.CPU, model=model)
    assert own_attributes(model) != before
    assert hooks_of(model)
    train_step(setup, workload.batch(4))
    setup.close()
    assert setup.model is model
    assert own_attributes(model) == before
    assert hooks_of(model) == []
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == implementation
    assert getattr(getattr(model, "config", None), "use_cache", True)
    model.float()(**workload.batch(2))  # works on its own


@pytest.mark.parametrize(
    ("config", "traits", "message"),
    [
        (
            {"activation_checkpointing": "full"},
            TRAITS,
            "activation_checkpointing: the model has no repeated blocks",
        ),
        ({"lora_rank": 8}, TRAITS, "lora_rank: the model has no linear layers"),
        (
            {"lora_rank": 8, "lora_targets": "attention"},
            replace(TRAITS, linears=3),
            "lora_targets: the model has no attention layers",
        ),
        (
            {"micro_batch_size": 2},
            replace(TRAITS, splits=False),
            "micro_batch_size: this loss cannot be split",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(
    config: dict, traits: Traits, message: str
) -> None:
    def never() -> nn.Module:
        raise AssertionError("the model was made")

    workload = replace(tiny.mlp_workload(), model=never, traits=traits)
    with pytest.raises(RefusedError, match=message):
        build(workload, config, tiny.CPU)


def test_wrong_knobs_are_wrong_input_and_not_refused() -> None:
    with pytest.raises(InputError) as caught:
        build(tiny.mlp_workload(), {"precision": "fp12"}, tiny.CPU)
    assert not isinstance(caught.value, RefusedError)


def test_a_living_model_is_given_back_when_building_fails_halfway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = tiny.llama_workload()
    model = workload.model()
    before = own_attributes(model)

    def no(_: str) -> None:
        raise ValueError("not here")

    monkeypatch.setattr(model, "set_attn_implementation", no, raising=False)
    before = own_attributes(model)
    with pytest.raises(RefusedError, match="this model has no eager attention"):
        build(workload, {**EVERYTHING, "precision": "bf16"}, tiny.CPU, model=model)
    assert own_attributes(model) == before
    assert hooks_of(model) == []


def test_weights_exist_before_blocks_are_touched_and_after_adapters_are_added() -> None:
    seen: dict[str, set[str]] = {}
    from autofit import techniques
    from autofit.setup import Stage, Technique

    class Watch(Technique):
        off = None

        def apply(self, setup: Setup, value: object) -> None:
            seen[self.name] = {parameter.device.type for parameter in setup.model.parameters()}

    for name, stage in (
        ("watch_weights", Stage.WEIGHTS),
        ("watch_adapt", Stage.ADAPT),
        ("watch_blocks", Stage.BLOCKS),
    ):
        techniques.register(type(name, (Watch,), {"name": name, "stage": stage, "values": (1,)})())
    try:
        build(
            tiny.mlp_workload(),
            dict.fromkeys(("watch_weights", "watch_adapt", "watch_blocks"), 1),
            tiny.CPU,
        )
    finally:
        for name in ("watch_weights", "watch_adapt", "watch_blocks"):
            techniques._registry.pop(name)
    assert seen == {"watch_weights": {"meta"}, "watch_adapt": {"meta"}, "watch_blocks": {"cpu"}}


def test_the_setup_says_what_was_settled() -> None:
    workload = tiny.mlp_workload(8)
    setup = build(workload, {"micro_batch_size": 2}, tiny.CPU)
    assert setup.config == canonicalize({"micro_batch_size": 2}, workload, tiny.CPU)
    assert (setup.micro_batch_size, setup.config["gradient_accumulation_steps"]) == (2, 4)
    assert setup.device == torch.device("cpu")
    assert setup.model.training


def test_a_living_model_is_trained_itself() -> None:
    model = tiny.MLP()
    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    setup = build(tiny.mlp_workload(), {}, tiny.CPU, model=model)
    train_step(setup, setup.workload.batch(4))
    assert setup.model is model
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert not any(
        torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)
    )


def test_weights_a_user_froze_stay_frozen() -> None:
    model = tiny.MLP()
    model.layers[0].requires_grad_(False)
    frozen = [parameter.detach().clone() for parameter in model.layers[0].parameters()]
    setup = build(tiny.mlp_workload(), {}, tiny.CPU, model=model)
    train_step(setup, setup.workload.batch(4))
    assert all(map(torch.equal, frozen, model.layers[0].parameters()))


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_everything_there() -> None:
    from autofit.hardware.device import detect

    setup = build(tiny.conv_workload(), {}, detect("cuda"))
    assert {tensor.device.type for tensor in setup.model.state_dict().values()} == {"cuda"}
    assert train_step(setup, setup.workload.batch(4)).isfinite()
