"""Preference losses in micro-batches, and on two ranks, are those of the whole batch on one device."""

import dataclasses
from typing import Any

import pytest
import torch

from autofit.core.workload import Hyperparameters, Workload
from autofit.data.batch import own_samples
from autofit.training.build import build
from autofit.training.evaluation import evaluate
from autofit.training.local_batch import LocalBatch
from autofit.training.step import accumulate, update
from tests import tiny
from tests.ranks import on_ranks
from tests.tolerances import LOSS

PAIRS = 6
LORA = {"lora_rank": 4}
DISTILL_TEACHER = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
TOP_K = "distill, top k"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "dpo, precomputed": ("dpo", {"reference": "precomputed"}),
    "dpo, adapter-off": ("dpo", {"reference": "adapter-off", **LORA}),
    "dpo, resident beside adapters": ("dpo", {"reference": "resident", **LORA}),
    "kto": ("kto", {}),
    "kto, adapter-off": ("kto", {"reference": "adapter-off", **LORA}),
    "orpo": ("orpo", {}),
    "orpo, LoRA": ("orpo", LORA),
    "simpo": ("simpo", {}),
    "reward": ("reward", {}),
    "reward, LoRA": ("reward", LORA),
    "distill": ("distill", {}),
    "distill, LoRA": ("distill", LORA),
    TOP_K: (TOP_K, {}),
    "grpo": ("grpo", {}),
    "grpo, LoRA": ("grpo", LORA),
}


def workload_of(task: str) -> Workload:
    if task == "grpo":
        made = tiny.preference_workload(task, PAIRS)
        return dataclasses.replace(made, count=made.batch.count)  # type: ignore[attr-defined]
    if task not in ("distill", TOP_K):
        return tiny.preference_workload(task, PAIRS)

    teacher = tiny.llama(**DISTILL_TEACHER)
    options = {"top_k": 8} if task == TOP_K else None
    return tiny.preference_workload(
        "distill", PAIRS, frozen={"teacher": teacher}, loss_options=options
    )


def batch_of(workload: Workload) -> dict[str, torch.Tensor]:
    """A batch with padding that differs from sample to sample."""
    batch: dict[str, torch.Tensor] = dict(workload.batch(PAIRS))
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    for row in range(PAIRS):
        batch["attention_mask"][row, ..., 16 - row :] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def trained(case: str, world: int, **knobs: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the trained weights."""
    task, own = CASES[case]
    workload = workload_of(task)
    hardware = dataclasses.replace(tiny.CPU, devices=world)
    setup = build(workload, {**own, **knobs}, hardware, hyperparameters=Hyperparameters(lr=1e-2))
    ranks = setup.ranks
    found = []
    for _ in range(3):
        part, counts = own_samples(batch_of(workload), ranks.dp_rank, ranks.layout.dp_degree)
        found.append(float(accumulate(setup, LocalBatch(part, counts))))
        assert update(setup)
    weights = {name: value.detach().clone() for name, value in setup.trained_values()}
    setup.close()
    return found, weights


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_train_what_the_whole_batch_trains(case: str) -> None:
    losses, weights = trained(case, 1)
    assert losses[2] < losses[0]
    for size in (2, 1):
        found, others = trained(case, 1, micro_batch_size=size)
        assert found == pytest.approx(losses, rel=LOSS)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4)


BY_TOKEN = [case for case in CASES if not case.startswith("reward")]
WHOLE = [case for case in BY_TOKEN if "lora_rank" not in CASES[case][1]]
CHUNKED: dict[str, Any] = {"loss": "chunked", "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *((case, "fp32") for case in BY_TOKEN),
        *((case, "bf16-mixed") for case in (*WHOLE, "dpo, adapter-off")),
    ],
)
def test_logits_in_chunks_train_what_all_logits_train(case: str, precision: str) -> None:
    losses, weights = trained(case, 1, precision=precision, micro_batch_size=2)
    found, others = trained(case, 1, precision=precision, **CHUNKED)
    is_exact = precision == "fp32"
    assert found == pytest.approx(losses, rel=LOSS if is_exact else 1e-2)
    for name, weight in weights.items() if is_exact else ():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4)


# Each loss, and each way to hold a reference, beside one of the two at least.
ON_RANKS = {
    "ddp": ("dpo", "kto, adapter-off", "orpo", "simpo", "reward, LoRA", TOP_K, "grpo, LoRA"),
    "fsdp": (
        *("dpo", "dpo, precomputed", "dpo, adapter-off", "dpo, resident beside adapters", "kto"),
        *("orpo, LoRA", "reward", "distill", "distill, LoRA", "grpo"),
    ),
}
IN_CHUNKS = {
    "ddp": ("dpo", "kto", "simpo", TOP_K, "grpo"),
    "fsdp": ("dpo, adapter-off", "kto, adapter-off", "orpo, LoRA", "distill, LoRA", "grpo, LoRA"),
}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_what_one_device_trains(parallel: str) -> None:
    tried = {*ON_RANKS[parallel], *IN_CHUNKS[parallel]}
    expected = {case: trained(case, 1)[0] for case in CASES if case in tried}
    for found in on_ranks(2, _on_rank, parallel):
        for (case, _), losses in found.items():
            # A divergence is a difference of logarithms of about 5, which round by 2e-7 each.
            assert losses == pytest.approx(expected[case], rel=LOSS, abs=1e-6), case


def _on_rank(parallel: str) -> dict[tuple[str, str], list[float]]:
    knobs = {"data_parallel": parallel, "micro_batch_size": 1}
    found = {(case, "standard"): trained(case, 2, **knobs)[0] for case in ON_RANKS[parallel]}
    for case in IN_CHUNKS[parallel]:
        found[case, "chunked"] = trained(case, 2, **knobs, loss="chunked")[0]
    return found


@pytest.mark.parametrize("task", ["kto", "orpo"])
def test_evaluation_asks_the_whole_batch_whatever_the_micro_batch(task: str) -> None:
    workload = workload_of(task)
    found = []
    for size in (PAIRS, 2):
        setup = build(workload, {"micro_batch_size": size}, tiny.CPU)
        found.append(evaluate(setup, [batch_of(workload)]))
        assert setup.progress.over_batch is None
    assert found[1] == pytest.approx(found[0], rel=1e-5)
