"""Packed samples that see one another are told of."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from autofit.core.workload import Workload
from autofit.data.batch import few_samples
from autofit.training.build import build
from autofit.training.inspect import inspect_workload
from autofit.training.packed_samples import note_of_mixed_samples
from autofit.training.workload import training_workload
from tests import tiny

LENGTH = 6


def rows(count: int = 2, samples: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (count, samples * LENGTH), generator=generator)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(LENGTH).repeat(count, samples),
    }


def masked() -> dict[str, torch.Tensor]:
    return rows() | {"attention_mask": torch.ones(2, 3 * LENGTH, dtype=torch.long)}


def bounds_alone() -> dict[str, torch.Tensor]:
    batch = rows(1)
    del batch["position_ids"]
    starts = torch.tensor([0, LENGTH, 2 * LENGTH, 3 * LENGTH], dtype=torch.int32)
    return batch | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}


def positions_beside_bounds() -> dict[str, torch.Tensor]:
    return bounds_alone() | {"position_ids": rows(1)["position_ids"]}


def padded() -> dict[str, torch.Tensor]:
    return {name: each for name, each in masked().items() if name != "position_ids"}


class Recurrent(nn.Module):
    """Whatever its positions say, it remembers what was before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 64)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> Any:
        logits = self.head(self.mix(self.embed(input_ids))[0])
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )


def llama() -> nn.Module:
    torch.manual_seed(0)
    return tiny.llama_workload().model()


def mamba() -> nn.Module:
    torch.manual_seed(0)
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    )


@pytest.mark.parametrize(
    ("make", "batch", "is_told"),
    [
        (llama, rows, False),
        (llama, lambda: rows(1), False),
        (llama, positions_beside_bounds, False),
        (llama, padded, False),
        (llama, masked, True),
        (llama, bounds_alone, True),
        (Recurrent, rows, True),
        (mamba, rows, True),
    ],
)
def test_what_is_seen_of_another_sample_is_said(make: Any, batch: Any, is_told: bool) -> None:
    model = make()
    workload = training_workload(model, [batch()], None)
    setup = build(workload, {}, tiny.CPU, model=model)
    note = note_of_mixed_samples(setup, few_samples(workload, 2))
    assert (note is not None) == is_told
    assert note is None or note.startswith(
        "packed samples see one another in this model: with other tokens"
    )
    assert setup.model.training
    setup.close()


@pytest.mark.parametrize(("make", "is_told"), [(Recurrent, True), (mamba, True), (llama, False)])
def test_a_search_says_it_too(make: Any, is_told: bool) -> None:
    workload = Workload(make, rows, effective_batch_size=2)
    traits = inspect_workload(workload, tiny.CPU, tiny.CPU.memory_bytes)
    assert any("see one another" in note for note in traits.notes) == is_told


def test_rows_of_packed_samples_have_their_length_in_the_mean() -> None:
    assert training_workload(llama(), [rows()], None).document_tokens == LENGTH
    assert training_workload(llama(), [padded()], None).document_tokens is None
    whole = rows() | {"position_ids": torch.arange(3 * LENGTH).repeat(2, 1)}
    assert training_workload(llama(), [whole], None).document_tokens is None
