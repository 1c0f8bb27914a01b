"""Predictions for people: what is asked, what it is asked of, and one sentence for what cannot be told."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.api.estimate import predict
from autofit.core.errors import InputError, RefusedError, UntraceableError
from autofit.core.estimate import OF_SEVERAL, PARTS
from autofit.core.hardware import GIB
from autofit.core.strict_yaml import dump
from autofit.core.workload import Workload
from autofit.estimate.rates import UNKNOWN
from autofit.hardware.catalogue import card
from autofit.tuning import target
from tests import tiny

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
PLAIN = {"precision": "bf16", "micro_batch_size": 2, "activation_checkpointing": "full"}


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's speed is taken as known: measuring it takes seconds."""
    rates = target.rates_for
    monkeypatch.setattr(
        target, "rates_for", lambda here: UNKNOWN if here.device == "cpu" else rates(here)
    )


def test_what_is_predicted_sums_up_and_is_held_against_the_card() -> None:
    found = autofit.estimate(tiny.llama_workload(), PLAIN, gpu="rtx-4090")
    assert isinstance(found, autofit.Estimate)
    assert set(found.breakdown) == set(PARTS) - set(OF_SEVERAL)
    assert sum(found.breakdown.values()) == found.allocated_bytes + found.breakdown["context"]
    assert found.reserved_bytes is not None
    assert found.allocated_bytes <= found.reserved_bytes
    assert found.low < found.reserved_bytes + found.breakdown["context"] < found.high
    assert found.verdict == "yes"
    assert found.budget.device_bytes == card("rtx-4090").memory_bytes
    assert found.tokens_per_second == pytest.approx(4 * 16 / found.step_seconds)
    assert found.notes == ()


def test_absent_knobs_are_off_and_what_is_set_comes_on_top() -> None:
    found = autofit.estimate(
        tiny.llama_workload(), {"optimizer": "sgd"}, gpu="h100", set={"micro_batch_size": 1}
    )
    assert (found.config["optimizer"], found.config["precision"]) == ("sgd", "fp32")
    assert (found.config["micro_batch_size"], found.config["gradient_accumulation_steps"]) == (1, 4)


@pytest.mark.parametrize("form", ["mapping", "knobs", "result"])
def test_a_config_may_be_a_mapping_or_a_file_of_its_own_or_a_result(
    form: str, tmp_path: Path
) -> None:
    config: Any = {**PLAIN, "gradient_accumulation_steps": 2}
    if form != "mapping":
        result = {"autofit": 1, "model": "llama", "workload": {}, "config": config}
        (tmp_path / "it.yaml").write_text(dump(config if form == "knobs" else result))
        config = tmp_path / "it.yaml"
    found = autofit.estimate(tiny.llama_workload(), config, gpu="h100", set={"micro_batch_size": 1})
    assert found.config["activation_checkpointing"] == "full"
    # follows from the micro-batch that was set
    assert found.config["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(("gpu", "precision"), [("h100", "bf16"), ("t4", "fp16-mixed")])
def test_without_a_config_a_language_model_starts_where_the_card_can(
    gpu: str, precision: str
) -> None:
    found = autofit.estimate(tiny.llama_workload(), gpu=gpu)
    expected = {
        "precision": precision,
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "lora_rank": 0,
    }
    assert {knob: found.config[knob] for knob in expected} == expected
    assert "no config was given" in found.notes[0]


def test_without_a_config_other_models_start_plain() -> None:
    found = autofit.estimate(tiny.vit_workload(), gpu="h100")
    assert (found.config["precision"], found.config["micro_batch_size"]) == ("fp32", 4)
    assert "no config was given" in found.notes[0]


def test_what_was_set_is_told_from_what_is_assumed() -> None:
    found = autofit.estimate(
        tiny.llama_workload(), gpu="h100", set={"precision": "fp32", "lora_rank": 4}
    )
    assert found.notes[0].startswith(
        "only lora_rank, precision of the config was given: the other knobs are where"
    )


def test_the_verdict_follows_the_budget() -> None:
    workload = tiny.llama_workload()
    verdicts = {}
    least = autofit.estimate(workload, PLAIN, device="cpu", mem=1)
    between = (least.low + least.high) / 2
    for name, nbytes in {"no": least.low - 1, "maybe": between, "yes": least.high + 1}.items():
        verdicts[name] = autofit.estimate(workload, PLAIN, device="cpu", mem=nbytes / GIB).verdict
    assert verdicts == {"no": "no", "maybe": "maybe", "yes": "yes"}
    assert least.reserved_bytes is None
    assert least.breakdown["context"] == 0


@NO_CUDA
def test_a_card_that_is_only_a_size_is_the_most_common_one_of_it() -> None:
    found = autofit.estimate(tiny.llama_workload(), PLAIN, gpu_mem=24)
    named = autofit.estimate(tiny.llama_workload(), PLAIN, gpu="rtx-4090")
    assert (found.allocated_bytes, found.step_seconds) == (
        named.allocated_bytes,
        named.step_seconds,
    )
    card_of_24 = "NVIDIA GeForce RTX 4090, the most common one of 24 GB"
    assert found.notes[0] == f"No card was named: {card_of_24}, is assumed; --gpu names another."
    assert found.budget.device_bytes == named.budget.device_bytes


@NO_CUDA
def test_a_size_that_few_cards_have_is_granted() -> None:
    found = autofit.estimate(tiny.llama_workload(), PLAIN, gpu_mem=512)
    assert found.verdict == "yes"
    assert found.budget.device_bytes == 512 * GIB
    assert found.step_seconds
    assert found.notes[0].startswith(
        "No card was named: few cards have 512 GiB, so one as fast as "
    )


@NO_CUDA
def test_without_any_device_named_the_prediction_is_for_this_cpu() -> None:
    found = predict(tiny.llama_workload(), PLAIN)
    assert found.hardware.device == "cpu"
    assert found.to_dict()["usable_bytes"] == found.budget.device_bytes


def test_a_smaller_card_and_a_model_of_another_kind() -> None:
    found = autofit.estimate(tiny.transformer_workload(), {"micro_batch_size": 2}, gpu="t4")
    assert found.tokens_per_second is None
    assert found.samples_per_second > 0


@NO_CUDA
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "rtx-4091"}, r"unknown GPU 'rtx-4091'\. Did you mean 'rtx-4090'\?"),
        ({"gpu": "h100", "gpu_mem": 24}, "two budgets"),
        ({"device": "cuda"}, r"there is no CUDA device here\. Name a card"),
        ({"gpu": "h100", "set": {"precision": ["bf16", "fp32"]}}, "precision is set to 2 values"),
        (
            {"gpu": "h100", "set": {"precison": "bf16"}},
            r"unknown knob 'precison'\. Did you mean 'precision'\?",
        ),
        ({"gpu": "h100", "trials": 3}, "unknown option 'trials'"),
        ({"gpu": "h100", "seq_len": 8}, "belong to a model given by name"),
        ({"gpu": "h100", "config": 3}, "config must be an .*, not 3"),
        ({"gpu": "h100", "config": "nowhere.yaml"}, r"nowhere\.yaml is not there"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        autofit.estimate(tiny.llama_workload(), **options)


def test_a_model_must_be_a_name_or_a_workload() -> None:
    with pytest.raises(InputError, match=r"a name or an autofit\.Workload, not a Linear"):
        autofit.estimate(nn.Linear(2, 2), gpu="h100")  # type: ignore[arg-type]


def test_a_config_that_cannot_be_is_refused_with_its_reason() -> None:
    with pytest.raises(RefusedError, match="bf16 needs compute capability"):
        autofit.estimate(tiny.llama_workload(), {"precision": "bf16"}, gpu="t4")


class Counting(nn.Module):
    """What comes out has as many rows as there are different features, which only numbers tell."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        return hidden[: len(hidden.unique())].sum()


class Peeking(Counting):
    """Leaves PyTorch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).sum() * float(self.fc(x).detach().numpy().max())


@pytest.mark.parametrize(("model", "operation"), [(Counting, "aten._unique2"), (Peeking, "numpy")])
def test_a_model_that_needs_numbers_is_told_with_the_operation(
    model: type[nn.Module], operation: str
) -> None:
    workload = Workload(
        model=model, batch=lambda n: {"x": torch.ones(n, 4)}, effective_batch_size=4, name="it"
    )
    with pytest.raises(
        UntraceableError, match=f"step of this model cannot be followed.*{operation}"
    ):
        autofit.estimate(workload, {}, gpu="h100")


def test_estimating_leaves_the_workload_alone() -> None:
    workload = tiny.llama_workload()
    before = dataclasses.replace(workload)
    autofit.estimate(workload, PLAIN, gpu="h100")
    assert workload == before


def test_an_estimate_shows_itself_in_a_notebook_that_imports_nothing_else() -> None:
    code = (
        "import autofit.api.estimate\n"
        "from autofit.core.estimate import Estimate\n"
        "from autofit.core.notebook import as_html\n"
        "assert as_html.dispatch(Estimate) is not as_html.dispatch(object)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
