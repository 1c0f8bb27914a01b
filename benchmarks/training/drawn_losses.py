"""Losses drawn at random for `benchmarks.equal_work`: forty kinds of training as people write them, of which some are
means over samples, tokens or other counts, and others couple the samples of a batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)

Batch = dict[str, Any]
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """A training with a loss of one's own; `terms`: how many terms its mean has in a batch (None: it is a sum)."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]  # of a seed
    loss: Callable[[nn.Module, Batch], Any]
    terms: Callable[[Batch], float] | None = None
    splits: bool = True
    seed: int = 0  # of its first batch


class GPT(nn.Module):
    """A language model of two blocks; its head may begin with zeros, or be the embedding."""

    def __init__(
        self, *, vocabulary: int = 64, width: int = 32, head: str = "own", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if head == "zero":
            nn.init.zeros_(self.head.weight)
        if head == "tied":
            self.head.weight = self.tokens.weight

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=hidden)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(ids))


class MLP(nn.Module):
    """Two layers; with a norm over the batch where `norm` says so."""

    def __init__(
        self, inputs: int = 12, outputs: int = 10, *, norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(24) if norm else nn.LayerNorm(24)
        self.layers = nn.Sequential(
            nn.Linear(inputs, 24), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(24, outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Convolutions(nn.Module):
    """Classifies every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def texts(
    size: int, *, length: int = 20, pad: int = 0, uneven: bool = True
) -> Callable[[int], Batch]:
    """Padded texts with labels that are the next tokens, a mask, and a weight and a number for each sample."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 64, (size, length), generator=generator)
        mask = torch.ones(size, length, dtype=torch.long)
        for row in range(size if uneven else 0):
            kept = int(torch.randint(3, length + 1, (), generator=generator))
            ids[row, kept:] = pad
            mask[row, kept:] = 0
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)
        given = ids.masked_fill(mask == 0, IGNORED)
        weights = torch.rand(size, generator=generator) + 0.1
        return {"ids": ids, "labels": labels, "given": given, "mask": mask, "weights": weights}

    return batch


def numbers(size: int, *, inputs: int = 12, classes: int = 10) -> Callable[[int], Batch]:
    """Vectors with a class, a target and their place in the batch."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, inputs, generator=generator)
        target = torch.randn(size, inputs, generator=generator)
        return {
            "x": x,
            "target": target,
            "y": torch.randint(0, classes, (size,), generator=generator),
        }

    return batch


def pictures(size: int) -> Callable[[int], Batch]:
    """Images with a class for every pixel, some of them unknown (255)."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 5, (size, 8, 8), generator=generator)
        for row in range(size):
            labels[row, : int(torch.randint(0, 6, (), generator=generator))] = 255
        return {"image": torch.randn(size, 3, 8, 8, generator=generator), "labels": labels}

    return batch


def boxes(size: int) -> Callable[[int], Batch]:
    """Vectors, each with a list of some targets."""

    def batch(seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(1, 6, (size,), generator=generator).tolist()
        x = torch.randn(size, 12, generator=generator)
        return {"x": x, "labels": [torch.randn(count, 10, generator=generator) for count in counts]}

    return batch


def of_tokens(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Cross-entropy over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def _valid(batch: Batch) -> float:
    return int((batch["labels"] != IGNORED).sum())


def _samples(batch: Batch) -> float:
    return len(next(iter(batch.values())))


def _token_mean(draw: random.Random) -> Case:
    head = draw.choice(["own", "zero", "tied"])
    smoothing = draw.choice([0.0, 0.1])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return of_tokens(model(batch["ids"]), batch["labels"], label_smoothing=smoothing)

    name = f"mean over next tokens, {head} head, smoothing {smoothing}"
    return Case(name, lambda: GPT(head=head), texts(draw.choice([4, 8, 12])), loss, _valid)


def _shifted(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return of_tokens(model(batch["ids"])[:, :-1], batch["given"][:, 1:])

    def terms(batch: Batch) -> float:
        return int((batch["given"][:, 1:] != IGNORED).sum())

    return Case("labels shifted in the loss", GPT, texts(draw.choice([8, 12])), loss, terms)


def _padding_ignored(draw: random.Random) -> Case:
    pad = draw.choice([0, 63])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return of_tokens(model(batch["ids"])[:, :-1], batch["ids"][:, 1:], ignore_index=pad)

    def terms(batch: Batch) -> float:
        return int((batch["ids"][:, 1:] != pad).sum())

    return Case(f"ignore_index={pad}, the id of padding", GPT, texts(8, pad=pad), loss, terms)


def _masked(draw: random.Random) -> Case:
    is_shifted = draw.random() < 0.5

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits, ids, mask = model(batch["ids"]), batch["ids"], batch["mask"]
        if is_shifted:
            logits, ids, mask = logits[:, :-1], ids[:, 1:], mask[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (each * mask).sum() / mask.sum()

    def terms(batch: Batch) -> float:
        return int(batch["mask"][:, 1:].sum() if is_shifted else batch["mask"].sum())

    name = "a masked mean" + (", shifted" if is_shifted else "")
    return Case(name, GPT, texts(8), loss, terms)


def _of_sample_means(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        each = F.cross_entropy(
            model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none"
        )
        valid = batch["labels"] != IGNORED
        return (each.sum(1) / valid.sum(1).clamp(min=1)).mean()

    return Case(
        "a mean over samples of means over tokens", GPT, texts(draw.choice([4, 8])), loss, _samples
    )


def _classes(draw: random.Random) -> Case:
    smoothing = draw.choice([0.0, 0.2])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=smoothing)

    return Case(
        f"classes, smoothing {smoothing}", MLP, numbers(draw.choice([4, 8])), loss, _samples
    )


def _elements(draw: random.Random) -> Case:
    kind = draw.choice([F.mse_loss, F.l1_loss, F.huber_loss])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return kind(model(batch["x"]), batch["target"])

    return Case(
        f"{kind.__name__} over elements", lambda: MLP(outputs=12), numbers(8), loss, _samples
    )


def _diffusion(draw: random.Random) -> Case:
    dropout = draw.choice([0.0, 0.2])

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch["x"]
        noise = torch.randn_like(x)
        time = torch.rand(len(x), 1, dtype=x.dtype)
        return F.mse_loss(model(time.sqrt() * x + (1 - time).sqrt() * noise), noise)

    return Case(
        f"denoising, dropout {dropout}",
        lambda: MLP(outputs=12, dropout=dropout),
        numbers(8),
        loss,
        _samples,
    )


def _noisy_tokens(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return of_tokens(model(batch["ids"]), batch["labels"])

    return Case("tokens with dropout", lambda: GPT(dropout=0.1), texts(8), loss, _valid)


def _sum_and_count(draw: random.Random) -> Case:
    def of_texts(model: nn.Module, batch: Batch) -> Any:
        total = of_tokens(model(batch["ids"]), batch["labels"], reduction="sum")
        return total, int((batch["labels"] != IGNORED).sum())

    def of_samples(model: nn.Module, batch: Batch) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["x"])

    if draw.random() < 0.6:
        return Case("(sum, count) of tokens", GPT, texts(8), of_texts, _valid)
    return Case("(sum, count) of samples", MLP, numbers(8), of_samples, _samples)


def _total(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return of_tokens(model(batch["ids"]), batch["labels"], reduction="sum")

    return Case("a sum", GPT, texts(8), loss, None)


def _two_terms_of_one_count(draw: random.Random) -> Case:
    share = 10 ** draw.uniform(-4, -1)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch["ids"])
        valid = batch["labels"] != IGNORED
        sizes = logits.logsumexp(-1)[valid].pow(2).mean()
        return of_tokens(logits, batch["labels"]) + share * sizes

    return Case("tokens and a z-loss of the same tokens", GPT, texts(8), loss, _valid)


def _regularised(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        weights = sum(weight.pow(2).sum() for weight in model.parameters())
        return of_tokens(model(batch["ids"]), batch["labels"]) + 1e-3 * weights

    return Case("tokens and weight decay", GPT, texts(8), loss, _valid)


def _pixels(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch["image"]), batch["labels"], ignore_index=255)

    def terms(batch: Batch) -> float:
        return int((batch["labels"] != 255).sum())

    return Case("pixels with unknown ones", Convolutions, pictures(8), loss, terms)


def _weighted_samples(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        each = F.cross_entropy(model(batch["ids"])[:, 0], batch["ids"][:, 1], reduction="none")
        weights = batch["weights"].to(each.dtype)
        return (each * weights).sum() / weights.sum()

    def terms(batch: Batch) -> float:
        return float(batch["weights"].sum(dtype=torch.float64))

    return Case("samples weighted in the batch", GPT, texts(8), loss, terms)


def _lists(draw: random.Random) -> Case:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        outputs = model(batch["x"])
        pairs = zip(outputs, batch["labels"], strict=True)
        errors = [
            (output - targets.to(output.dtype)).pow(2).mean(1).sum() for output, targets in pairs
        ]
        return torch.stack(errors).sum() / sum(len(targets) for targets in batch["labels"])

    def terms(batch: Batch) -> float:
        return sum(len(targets) for targets in batch["labels"])

    return Case("a mean over the items of lists", MLP, boxes(8), loss, terms)


SPLITTING: tuple[Callable[[random.Random], Case], ...] = (
    *(
        _token_mean,
        _shifted,
        _padding_ignored,
        _masked,
        _of_sample_means,
        _classes,
        _elements,
        _diffusion,
    ),
    *(
        _noisy_tokens,
        _sum_and_count,
        _total,
        _two_terms_of_one_count,
        _regularised,
        _pixels,
        _weighted_samples,
        _lists,
    ),
)


class Queue(nn.Module):
    """MoCo's: each sample is told from those of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = MLP(outputs=8)
        self.register_buffer("queue", torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = F.normalize(self.encoder(x), dim=1)
        logits = torch.cat(
            [(own * own.detach().roll(1, 1)).sum(1, keepdim=True), own @ self.queue.to(x.dtype).T],
            1,
        )
        self.queue = torch.cat([own.detach(), self.queue.to(x.dtype)])[:16]
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))


class Experts(nn.Module):
    """Four experts, and a loss that keeps them evenly used (Switch Transformers, section 2.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        used = F.one_hot(shares.argmax(-1), 4).to(x.dtype).mean(0)
        return (shares.unsqueeze(-1) * outputs).sum(1), 4 * (used * shares.mean(0)).sum()


class LayerDrop(MLP):
    """Leaves a layer out for the whole batch, by chance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if torch.rand(()) < 0.6 else self.layers[4](self.layers[0](x))


class Moving(MLP):
    """Divides by a running size of its outputs, kept as a plain attribute."""

    size = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        self.size = 0.9 * self.size + 0.1 * float(outputs.detach().abs().mean())
        return outputs / self.size


def _coupling(
    name: str, model: Callable[[], nn.Module], loss: Callable[..., Any], of_texts: bool = False
) -> Case:
    return Case(name, model, texts(8) if of_texts else numbers(8), loss, splits=False)


def _classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _contrastive(model: nn.Module, batch: Batch) -> torch.Tensor:
    one, other = F.normalize(model(batch["x"]), dim=1), F.normalize(model(batch["target"]), dim=1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def _routed(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs, balance = model(batch["x"])
    return F.cross_entropy(outputs, batch["y"]) + 0.01 * balance


def _tokens_and_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    features = model.features(batch["ids"])
    return of_tokens(model.head(features), batch["labels"]) + 0.1 * features[:, 0].pow(2).mean()


def _masked_and_tokens(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["ids"])
    return of_tokens(logits, batch["labels"]) + 1e-3 * logits.logsumexp(-1).pow(2).mean()


def _class_weighted(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(batch["x"])
    return F.cross_entropy(
        outputs, batch["y"], weight=torch.linspace(0.1, 3.0, 10, dtype=outputs.dtype)
    )


def _balanced(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(batch["x"])
    counts = torch.bincount(batch["y"], minlength=10).clamp(min=1)
    return F.cross_entropy(outputs, batch["y"], weight=(1 / counts).to(outputs.dtype))


def _root(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["target"]).sqrt()


def _dice(model: nn.Module, batch: Batch) -> torch.Tensor:
    shares, wanted = model(batch["x"]).softmax(-1), F.one_hot(batch["y"], 10)
    return 1 - (2 * (shares * wanted).sum() + 1) / (shares.pow(2).sum() + wanted.sum() + 1)


def _variance(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(batch["x"])
    return (
        F.mse_loss(outputs, batch["target"])
        + F.relu(1 - outputs.var(dim=0, unbiased=False).add(1e-4).sqrt()).mean()
    )


def _largest(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none").topk(2).values.mean()


def _advantages(model: nn.Module, batch: Batch) -> torch.Tensor:
    rewards = batch["target"].mean(1)
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-6)
    return -(advantages * model(batch["x"]).log_softmax(-1)[:, 0]).mean()


def _ranked(model: nn.Module, batch: Batch) -> torch.Tensor:
    scores = model(batch["x"])[:, 0]
    return -F.logsigmoid(scores.unsqueeze(0) - scores.unsqueeze(1)).triu(1).mean()


def _soft_maximum(model: nn.Module, batch: Batch) -> torch.Tensor:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return each.exp().mean().log()


def _one_time(model: nn.Module, batch: Batch) -> torch.Tensor:
    time = torch.rand((), dtype=batch["x"].dtype)
    noise = torch.randn_like(batch["x"])
    return F.mse_loss(model(time * batch["x"] + (1 - time) * noise), noise)


def _mixed_up(model: nn.Module, batch: Batch) -> torch.Tensor:
    order = torch.randperm(len(batch["x"]))
    outputs = model(0.7 * batch["x"] + 0.3 * batch["x"][order])
    return 0.7 * F.cross_entropy(outputs, batch["y"]) + 0.3 * F.cross_entropy(
        outputs, batch["y"][order]
    )


def _python_noise(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"] * random.uniform(0.5, 1.5)), batch["target"])


COUPLING: tuple[Callable[[random.Random], Case], ...] = (
    lambda _: _coupling("contrastive", MLP, _contrastive),
    lambda _: _coupling("BatchNorm", lambda: MLP(norm=True), _classify),
    lambda _: _coupling("a queue", Queue, lambda model, batch: model(batch["x"])),
    lambda _: _coupling("routers", Experts, _routed),
    lambda _: _coupling("tokens and samples", GPT, _tokens_and_samples, of_texts=True),
    lambda _: _coupling("valid tokens and all tokens", GPT, _masked_and_tokens, of_texts=True),
    lambda _: _coupling("class weights", MLP, _class_weighted),
    lambda _: _coupling("classes balanced in the batch", MLP, _balanced),
    lambda _: _coupling("root of a mean", lambda: MLP(outputs=12), _root),
    lambda _: _coupling("Dice over the batch", MLP, _dice),
    lambda _: _coupling("variance over the batch", lambda: MLP(outputs=12), _variance),
    lambda _: _coupling("the two largest losses", MLP, _largest),
    lambda _: _coupling("advantages normalised in the batch", MLP, _advantages),
    lambda _: _coupling("pairs ranked in the batch", MLP, _ranked),
    lambda _: _coupling("soft maximum", MLP, _soft_maximum),
    lambda _: _coupling("one draw for all samples", lambda: MLP(outputs=12), _one_time),
    lambda _: _coupling("mixup", MLP, _mixed_up),
    lambda _: _coupling("numbers of Python's random", lambda: MLP(outputs=12), _python_noise),
    lambda _: _coupling("a layer left out by chance", LayerDrop, _classify),
    lambda _: _coupling("a running size", Moving, _classify),
)


def drawn(seed: int, splitting: int = 40) -> list[Case]:
    """So many cases that split, every kind at least once, and each kind that does not."""
    draw = random.Random(seed)
    kinds = [*SPLITTING, *(draw.choice(SPLITTING) for _ in range(splitting - len(SPLITTING)))]
    return [replace(kind(draw), seed=draw.randrange(10**6)) for kind in (*kinds, *COUPLING)]
