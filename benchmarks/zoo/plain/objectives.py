"""Networks whose loss is what is special: preferences, contrasts, teachers, games, graphs, equations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit
from autofit.models import HuggingFaceModel

WIDTH, LENGTH, VOCABULARY, BATCH, NODES = 64, 32, 512, 8, 24
Batch = dict[str, Any]
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def language_model() -> nn.Module:
    """A GPT-2 of two layers."""
    return HuggingFaceModel("gpt2", "causal-lm", GPT2)()


def points(n: int) -> Batch:
    """Features and classes."""
    return {"x": torch.randn(n, WIDTH), "y": torch.arange(n) % 10}


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the samples."""
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def preferences(n: int) -> Batch:
    """Two answers to each prompt, the better one first."""
    return {
        "chosen": torch.randint(VOCABULARY, (n, LENGTH)),
        "rejected": torch.randint(VOCABULARY, (n, LENGTH)),
    }


class Preferring(nn.Module):
    """A policy beside its frozen self, as for direct preference optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = language_model(), language_model().requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ids = torch.cat([chosen, rejected])
        with torch.no_grad():
            reference = log_likelihood(self.reference, ids)
        better, worse = (log_likelihood(self.policy, ids) - reference).chunk(2)
        return -functional.logsigmoid(0.1 * (better - worse)).mean()


def log_likelihood(model: nn.Module, ids: Tensor) -> Tensor:
    """Of each text [n]."""
    scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0].sum(-1)


class Rewarding(nn.Module):
    """A reward model: the better answer is to have the higher score."""

    def __init__(self) -> None:
        super().__init__()
        self.body = language_model()
        self.body.lm_head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        better, worse = (self.body(input_ids=ids).logits[:, -1, 0] for ids in (chosen, rejected))
        return -functional.logsigmoid(better - worse).mean()


class Clipped(nn.Module):
    """A policy with a value head, for proximal policy optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = language_model(), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, old: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
        output = self.body(input_ids=ids, output_hidden_states=True)
        new = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (new - old).exp()
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return policy + functional.mse_loss(
            self.value(output.hidden_states[-1])[:, :-1, 0], returns
        )


def rollouts(n: int) -> Batch:
    """Texts with what they were worth."""
    shape = n, LENGTH - 1
    drawn = {name: torch.randn(shape) for name in ("old", "advantages", "returns")}
    return {"ids": torch.randint(VOCABULARY, (n, LENGTH)), **drawn}


class Distilled(nn.Module):
    """A student beside its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            mlp(WIDTH, 64, 64, 10),
            mlp(WIDTH, 256, 256, 10).requires_grad_(False),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x).softmax(-1)
        found = self.student(x)
        divergence = functional.kl_div(found.log_softmax(-1), wanted, reduction="batchmean")
        return functional.cross_entropy(found, y) + divergence


class Contrasting(nn.Module):
    """Two views of each sample, which are to find each other among all (SimCLR, CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.scale = (
            mlp(WIDTH, 128, 64),
            mlp(WIDTH, 128, 64),
            nn.Parameter(torch.tensor(2.0)),
        )

    def forward(self, x: Tensor) -> Tensor:
        one, other = (functional.normalize(net(x), dim=-1) for net in (self.one, self.other))
        scores, wanted = one @ other.T * self.scale.exp(), torch.arange(len(x), device=x.device)
        return (
            functional.cross_entropy(scores, wanted) + functional.cross_entropy(scores.T, wanted)
        ) / 2


class Bootstrapped(nn.Module):
    """BYOL: a network that predicts what its slowly following copy sees."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(WIDTH, 128, 64), mlp(WIDTH, 128, 64).requires_grad_(False)
        self.predictor = mlp(64, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            wanted = self.target(x + 0.1)
        return -functional.cosine_similarity(self.predictor(self.online(x)), wanted).mean()


class Convolved(nn.Module):
    """A graph convolutional network on adjacency matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
            nn.Linear(WIDTH, 10),
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        spread = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers:
            x = functional.relu(layer(spread @ x)) + x
        return self.head(x.mean(1))


class Passing(nn.Module):
    """Messages along lists of edges, gathered and scattered, with attention over each node's edges."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(mlp(2 * WIDTH, WIDTH, WIDTH) for _ in range(2))
        self.score, self.head = nn.Linear(2 * WIDTH, 1), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        n, nodes, width = x.shape
        edges = (
            (edges + torch.arange(n, device=x.device)[:, None, None] * nodes)
            .transpose(0, 1)
            .flatten(1)
        )
        hidden = x.flatten(0, 1)
        for message in self.message:
            both = torch.cat([hidden[edges[0]], hidden[edges[1]]], -1)
            weights = self.score(both).exp()
            total = torch.zeros(len(hidden), 1, device=x.device).index_add(0, edges[1], weights)
            sent = message(both) * weights / total[edges[1]]
            hidden = hidden + torch.zeros_like(hidden).scatter_add(
                0, edges[1][:, None].expand(-1, width), sent
            )
        return self.head(hidden.view(n, nodes, width).mean(1))


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The class of each graph."""
    return functional.cross_entropy(model(batch["x"], batch["edges"]), batch["y"])


def dense_graphs(n: int) -> Batch:
    """Nodes and adjacency matrices."""
    return {
        "x": torch.randn(n, NODES, WIDTH),
        "edges": torch.randint(2, (n, NODES, NODES)).float(),
        "y": torch.arange(n) % 10,
    }


def sparse_graphs(n: int) -> Batch:
    """Nodes and lists of edges."""
    return {
        "x": torch.randn(n, NODES, WIDTH),
        "edges": torch.randint(NODES, (n, 2, 96)),
        "y": torch.arange(n) % 10,
    }


class Recommending(nn.Module):
    """Users, items and bags of words to one score: a deep factorisation machine."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(1000, 32), nn.Embedding(1000, 32)
        self.words, self.deep = nn.EmbeddingBag(VOCABULARY, 32), mlp(96, 64, 1)

    def forward(self, users: Tensor, items: Tensor, words: Tensor) -> Tensor:
        parts = [self.users(users), self.items(items), self.words(words)]
        return (parts[0] * parts[1]).sum(-1) + self.deep(torch.cat(parts, -1))[:, 0]


def clicks(n: int) -> Batch:
    """Who saw what, and whether they liked it."""
    ids = {"users": torch.randint(1000, (n,)), "items": torch.randint(1000, (n,))}
    return {**ids, "words": torch.randint(VOCABULARY, (n, 8)), "y": torch.arange(n).float() % 2}


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy."""
    scores = model(batch["users"], batch["items"], batch["words"])
    return functional.binary_cross_entropy_with_logits(scores, batch["y"])


class Flow(nn.Module):
    """Affine couplings whose density is known."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(mlp(WIDTH // 2, 64, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        density = torch.zeros(len(x), device=x.device)
        for coupling in self.couplings:
            one, other = x.chunk(2, -1)
            scale, shift = coupling(one).chunk(2, -1)
            x = torch.cat([other * scale.tanh().exp() + shift, one], -1)
            density = density + scale.tanh().sum(-1)
        return ((x**2).sum(-1) / 2 - density).mean()


class Differential(nn.Module):
    """A neural differential equation by Runge and Kutta's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = mlp(WIDTH, 128, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        step = 0.25
        for _ in range(4):
            first = self.field(x)
            second = self.field(x + step / 2 * first)
            third = self.field(x + step / 2 * second)
            x = x + step / 6 * (first + 2 * second + 2 * third + self.field(x + step * third))
        return self.head(x)


def physics_loss(model: nn.Module, batch: Batch) -> Tensor:
    """How far a network is from solving the heat equation, by its own derivatives."""
    x = batch["x"].requires_grad_()
    u = model(x)
    first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)[0]
    return ((first[:, 0] - second[:, 1]) ** 2).mean()


class Radiance(nn.Module):
    """NeRF: colour and density along rays, composed."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(3 * 12, 64, 64, 4)

    def forward(self, origins: Tensor, directions: Tensor) -> Tensor:
        places = (
            origins[:, None]
            + directions[:, None] * torch.linspace(0, 1, 16, device=origins.device)[:, None]
        )
        waves = torch.cat([f(places * 2**n) for n in range(6) for f in (torch.sin, torch.cos)], -1)
        colour, density = self.network(waves).split([3, 1], -1)
        left = (-functional.softplus(density) / 16).exp()
        weights = (1 - left) * torch.cat([torch.ones_like(left[:, :1]), left[:, :-1].cumprod(1)], 1)
        return (weights * colour.sigmoid()).sum(1)


class Valued(nn.Module):
    """Q-learning beside a frozen target network."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            mlp(WIDTH, 128, 128, 6),
            mlp(WIDTH, 128, 128, 6).requires_grad_(False),
        )

    def forward(self, now: Tensor, action: Tensor, reward: Tensor, then: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = reward + 0.99 * self.target(then).amax(-1)
        return functional.smooth_l1_loss(self.online(now).gather(-1, action[:, None])[:, 0], wanted)


def experience(n: int) -> Batch:
    """What was seen, done and earned."""
    seen = {"now": torch.randn(n, WIDTH), "then": torch.randn(n, WIDTH)}
    return {**seen, "action": torch.randint(6, (n,)), "reward": torch.randn(n)}


class Tied(nn.Module):
    """An autoencoder whose decoder is its encoder transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias = nn.Linear(WIDTH, 32), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(
            functional.linear(self.encoder(x).relu(), self.encoder.weight.T, self.bias), x
        )


class Tasks(nn.Module):
    """One body and two heads, with batches in tuples within dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.value = (
            mlp(WIDTH, 128, 64),
            nn.Linear(64, 10),
            nn.Linear(64, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.classes(hidden), self.value(hidden)


def task_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of both."""
    classes, value = model(batch["x"])
    wanted, amount = batch["targets"]
    return functional.cross_entropy(classes, wanted) + functional.mse_loss(value[:, 0], amount)


def _workload(
    model: Callable[[], nn.Module], batch: Any = points, loss: Any = class_loss
) -> autofit.Workload:
    return autofit.Workload(model=model, batch=batch, loss=loss, effective_batch_size=BATCH)


def _own(model: nn.Module, batch: Batch) -> Tensor:
    return model(**{name: value for name, value in batch.items() if name != "y"})


def _all(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch)


def perceptron() -> autofit.Workload:
    return _workload(lambda: mlp(WIDTH, 128, 128, 10))


def dpo() -> autofit.Workload:
    return _workload(Preferring, preferences, _all)


def reward() -> autofit.Workload:
    return _workload(Rewarding, preferences, _all)


def ppo() -> autofit.Workload:
    return _workload(Clipped, rollouts, _all)


def distillation() -> autofit.Workload:
    return _workload(Distilled, loss=_all)


def contrastive() -> autofit.Workload:
    return _workload(Contrasting, loss=_own)


def byol() -> autofit.Workload:
    return _workload(Bootstrapped, loss=_own)


def graph_convolutions() -> autofit.Workload:
    return _workload(Convolved, dense_graphs, graph_loss)


def message_passing() -> autofit.Workload:
    return _workload(Passing, sparse_graphs, graph_loss)


def recommender() -> autofit.Workload:
    return _workload(Recommending, clicks, click_loss)


def normalizing_flow() -> autofit.Workload:
    return _workload(Flow, loss=_own)


def neural_ode() -> autofit.Workload:
    return _workload(Differential)


def physics_informed() -> autofit.Workload:
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    return _workload(network, lambda n: {"x": torch.rand(n, 2)}, physics_loss)


def nerf() -> autofit.Workload:
    rays = {"origins": 3, "directions": 3, "colour": 3}
    return _workload(
        Radiance,
        lambda n: {name: torch.rand(n, width) for name, width in rays.items()},
        lambda model, batch: functional.mse_loss(
            model(batch["origins"], batch["directions"]), batch["colour"]
        ),
    )


def q_learning() -> autofit.Workload:
    return _workload(Valued, experience, _all)


def tied_autoencoder() -> autofit.Workload:
    return _workload(Tied, loss=_own)


def two_tasks() -> autofit.Workload:
    batch = lambda n: {  # noqa: E731
        "x": torch.randn(n, WIDTH),
        "targets": (torch.arange(n) % 10, torch.randn(n)),
    }
    return _workload(Tasks, batch, task_loss)
