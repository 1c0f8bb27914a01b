"""Which weights are groups of their own; what training with them gives is in training/test_several_ranks.py."""

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autofit.training.build import build
from tests.ranks import on_ranks
from tests.tiny import CPU, llama_workload


def groups(tied: bool, loss: str) -> tuple[set[str], bool, list[int]]:
    """The modules that are gathered by themselves, whether all weights are divided, and the bytes of them here."""
    knobs: dict[str, Any] = {"data_parallel": "fsdp", "loss": loss}
    setup = build(llama_workload(tie_word_embeddings=tied), knobs, replace(CPU, devices=2))
    names = {name for name, module in setup.model.named_modules() if isinstance(module, FSDPModule)}
    parameters = list(setup.model.parameters())
    here = [sum(p.to_local().nbytes for p in parameters), sum(p.nbytes for p in parameters)]
    return names, all(isinstance(p.data, DTensor) or isinstance(p, DTensor) for p in parameters), here


def test_blocks_and_large_ends_are_gathered_by_themselves() -> None:
    blocks = {"model.layers.0", "model.layers.1"}
    names, divided, (here, whole) = on_ranks(2, groups, False, "standard")[0]
    assert names == {"", "model.embed_tokens", "lm_head", *blocks}
    assert divided
    assert 2 * here == whole
    assert on_ranks(2, groups, True, "standard")[0][0] == {"", *blocks}
    assert on_ranks(2, groups, False, "chunked")[0][0] == {"", "model.embed_tokens", *blocks}


def test_ranks_that_start_from_other_weights_train_those_of_the_first() -> None:
    first, second = on_ranks(2, weights_of_own)
    assert first == second


def weights_of_own() -> float:
    torch.manual_seed(torch.distributed.get_rank())
    workload = llama_workload()
    setup = build(workload, {"data_parallel": "ddp"}, replace(CPU, devices=2), model=workload.model())
    return float(sum(p.double().sum() for p in setup.model.parameters()))
