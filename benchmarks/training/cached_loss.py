"""Sentence embeddings by a loss over the whole batch, in micro-batches: beside sentence-transformers' cached loss.

`python -m benchmarks.training.cached_loss [--pairs N] [--lengths even|uneven] [--rounds N]`; a BERT of 6 layers on the
CPU, the same weights, batches and micro-batches, steps in turns in one process. Prints the ratio of medians.

`--memory` compares the memory of a step of 2 layers over 512 pairs at once with that over 4,096 in micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer import losses as theirs
from torch import nn

from autofit.core.workload import Hyperparameters, Workload
from autofit.hardware.device import detect
from autofit.hardware.tracker import StorageTracker
from autofit.models.huggingface import HuggingFaceModel, huggingface_workload
from autofit.training.build import build
from autofit.training.step import train_step

BERT = {
    "model_type": "bert",
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 128,
}
TOKENS = 64
MICRO = 16
FEW = 512  # pairs
MANY = 4096


class Encoder(nn.Module):
    """As sentence-transformers asks a model: features in, a sentence embedding out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getitem__(self, _: int) -> nn.Module:
        return self.model

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"]
        hidden = self.model(input_ids=features["input_ids"], attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        means = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return {**features, "sentence_embedding": means}


def workload_of(pairs: int, **changes: Any) -> Workload:
    """Random pairs for that BERT."""
    source = {"kind": "directory", "path": "bert"}
    model = HuggingFaceModel("bert", "embed", {**BERT, **changes}, source)
    return huggingface_workload(model, sequence_length=TOKENS, effective_batch_size=pairs)


def batch_of(workload: Workload, pairs: int, *, uneven: bool) -> dict[str, torch.Tensor]:
    """Pairs of whole texts, or of 8 to 64 tokens, most of them short, padded to the longest."""
    batch = dict(workload.batch(pairs))
    mask = torch.ones_like(batch["input_ids"])
    if uneven:
        generator = torch.Generator().manual_seed(0)
        shares = torch.rand(mask.shape[:2], generator=generator) ** 2
        lengths = 8 + (shares * (TOKENS - 8)).long()
        mask = (torch.arange(TOKENS) < lengths[..., None]).long()
        mask[0] = 1
    return {**batch, "attention_mask": mask}


def ours(
    pairs: int, micro: int, batch: dict[str, torch.Tensor], **changes: Any
) -> Callable[[], Any]:
    """A step of autofit."""
    workload = workload_of(pairs, **changes)
    torch.manual_seed(0)
    model = workload.model()
    setup = build(
        workload,
        {"micro_batch_size": micro},
        detect("cpu"),
        model=model,
        hyperparameters=Hyperparameters(lr=1e-5),
    )
    return lambda: float(train_step(setup, batch))


def other(
    pairs: int, micro: int, batch: dict[str, torch.Tensor], **options: Any
) -> Callable[[], Any]:
    """A step of sentence-transformers' loss, with a fused AdamW."""
    torch.manual_seed(0)
    encoder = Encoder(workload_of(pairs).model()).train()
    loss = theirs.CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=micro, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    features = [
        {key: tensor[:, text].contiguous() for key, tensor in batch.items()} for text in range(2)
    ]

    def step() -> float:
        value = loss(features, labels=None)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def peak(step: Callable[[], Any]) -> int:
    """The tracked bytes that a second step adds at most."""
    step()
    gc.collect()
    with StorageTracker() as tracker:
        step()
    return tracker.peak


def compare_memory() -> None:
    """Print what steps add at most, over few pairs at once and over many in micro-batches."""
    layers = {"num_hidden_layers": 2}
    few = batch_of(workload_of(FEW), FEW, uneven=False)
    at_once = peak(ours(FEW, FEW, few, **layers))
    print(f"{FEW:,} pairs at once: {at_once / 2**20:,.1f} MiB")

    many = batch_of(workload_of(MANY), MANY, uneven=False)
    replayed = peak(ours(MANY, MICRO, many, **layers))
    print(f"{MANY:,} pairs, {MICRO} at a time: {replayed / 2**20:,.1f} MiB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Time steps in turns, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=128)
    parser.add_argument("--lengths", choices=("even", "uneven"), default="even")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args(arguments)
    if given.memory:
        compare_memory()
        return

    uneven = given.lengths == "uneven"
    batch = batch_of(workload_of(given.pairs), given.pairs, uneven=uneven)
    options: dict[str, Any] = {"mini_batch_num_tokens": 2 * MICRO * TOKENS} if uneven else {}
    steps = {
        "autofit": ours(given.pairs, MICRO, batch),
        # whose mini-batch counts texts, not pairs
        "sentence-transformers": other(given.pairs, 2 * MICRO, batch, **options),
    }
    losses = {name: step() for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)

    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        print(f"{name:22} {median:7.3f} s a step, first loss {losses[name]:.6f}")
    ratio = medians["autofit"] / medians["sentence-transformers"]
    print(f"autofit takes {ratio - 1:+.1%} of its time, by medians of {given.rounds} in turns")


if __name__ == "__main__":
    main()
