"""search leaves the model alone, takes workloads of any kind, and says what is wrong in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import autofit
from autofit.api.search import search
from autofit.core.errors import InputError
from autofit.core.events import Event, Note, ProbeStarted, SearchStarted
from autofit.core.measurement import Outcome
from autofit.training import random_state
from tests import tiny
from tests.api.fitting import NARROW, assert_same, batches, contrastive, mlp, noisy, weights


@pytest.mark.usefixtures("shared_zygote")
def test_a_search_touches_neither_the_model_nor_random_numbers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    of_loader = generator.get_state()
    features, classes = batches(1)[0]
    data = TensorDataset(features.repeat(3, 1), classes.repeat(3))
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    model = noisy().eval()
    model.body[0].weight.requires_grad_(False)
    before, parameters = weights(model), list(model.parameters())
    random_state.seed_host(5)
    random_numbers = random_state.capture(torch.device("cpu"))
    result = search(
        model,
        loader,
        loss=tiny.classify,
        device="cpu",
        mem=1,
        trials=1,
        set=NARROW,
        out=tmp_path / "r",
    )
    assert result.best
    assert random_state.is_at(random_numbers)
    assert torch.equal(generator.get_state(), of_loader)
    assert result.model == "Noisy"
    assert result.workload["effective_batch_size"] == 8
    assert_same(weights(model), before)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [parameter.requires_grad for parameter in parameters[:2]] == [False, True]
    assert not any(module.training or module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.usefixtures("shared_zygote")
def test_a_contrastive_loss_is_searched_unsplit(tmp_path: Path) -> None:
    events: list[Event] = []
    result = search(
        mlp(),
        batches(),
        loss=contrastive,
        device="cpu",
        mem=1,
        trials=1,
        set=NARROW,
        out=tmp_path / "r",
        listener=events.append,
    )
    assert result.skipped["refused"] > 0
    (started,) = (event for event in events if isinstance(event, SearchStarted))
    assert (started.space_size, started.refused) == (result.space_size, result.skipped["refused"])
    assert {trial.config["micro_batch_size"] for trial in result.trials} == {8}
    assert any(
        isinstance(event, Note) and "the loss cannot be split" in event.text for event in events
    )


# peft asks for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.usefixtures("shared_zygote")
def test_adapters_on_adapters_are_refused_before_the_first_probe(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny.llama()(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    events: list[Event] = []
    with pytest.raises(
        InputError, match="the model already has adapters from an earlier training: use lora_rank 0"
    ):
        search(
            model,
            [tiny.llama_workload().batch(4)],
            device="cpu",
            mem=1,
            space="lora",
            out=tmp_path / "r",
            listener=events.append,
        )
    assert not any(isinstance(event, ProbeStarted) for event in events)


@pytest.mark.usefixtures("shared_zygote")
def test_a_workload_of_ones_own(tmp_path: Path) -> None:
    result = autofit.search(
        tiny.mlp_workload(), device="cpu", mem=1, trials=1, set=NARROW, out=tmp_path / "r"
    )
    assert result.trials[0].outcome is Outcome.FITS
    assert "samples/s" in autofit.explain(result)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: search(tiny.mlp_workload(), batches()),
            "a count and frozen models belong to a living model",
        ),
        (
            lambda: search("gpt2", loss=tiny.classify),
            "a count and frozen models belong to a living model",
        ),
        (
            lambda: search(tiny.mlp_workload(), seq_len=8),
            "effective_batch and loss_options belong to a model given by name",
        ),
        (
            lambda: search(mlp(), batches(), effective_batch=8),
            "effective_batch and loss_options belong",
        ),
        (lambda: search("gpt3"), r"unknown model 'gpt3'\. Did you mean 'gpt2'"),
        (lambda: search("gpt2", trails=3), r"unknown option 'trails'\. Did you mean 'trials'"),
        (lambda: search("gpt2", mem=0), "the memory must be more than 0 GiB"),
        (lambda: search(mlp(), []), "the loader is empty"),
        (
            lambda: search(object(), batches()),
            "must be an nn.Module or the name of one, not a object",
        ),
    ],
)
def test_bad_input_to_a_search(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
