"""Networks on sequences: recurrent, convolutional and attentive ones, as people write them without a library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import autofit

WIDTH, LENGTH, VOCABULARY, BATCH = 64, 32, 512, 8
Batch = dict[str, Tensor]


def tokens(n: int, length: int = LENGTH) -> Tensor:
    """Token ids [n, length]."""
    return torch.randint(VOCABULARY, (n, length), device="cpu")


def next_token(n: int) -> Batch:
    """Tokens, and those that come after each."""
    ids = tokens(n, LENGTH + 1)
    return {"x": ids[:, :-1], "y": ids[:, 1:]}


def pairs(n: int) -> Batch:
    """Tokens of two languages."""
    return {"x": tokens(n), "y": tokens(n)}


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over all tokens."""
    return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same with teacher forcing."""
    logits = model(batch["x"], batch["y"][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch["y"][:, 1:].flatten())


class Recurrent(nn.Module):
    """A language model on an LSTM, GRU or plain recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


class Cells(nn.Module):
    """An LSTM unrolled by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in self.embed(x).unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, 1))


class Packed(nn.Module):
    """A classifier of sequences that are packed by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][-1])


class Attending(nn.Module):
    """An encoder and a decoder of GRUs with Bahdanau's attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.keys, self.query, self.score = (
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1),
        )
        self.decoder, self.head = nn.GRUCell(3 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(x))
        keys, state, outputs = self.keys(memory), last[0], []
        for step in self.target(y).unbind(1):
            weights = self.score(torch.tanh(keys + self.query(state)[:, None])).softmax(1)
            state = self.decoder(torch.cat([step, (weights * memory).sum(1)], -1), state)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class Encoder(nn.Module):
    """PyTorch's own encoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.layers(self.embed(x), mask=mask, is_causal=True))


class Translator(nn.Module):
    """PyTorch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.head(self.layers(self.embed(x), self.embed(y), tgt_mask=mask))


class Block(nn.Module):
    """Attention and a network after it, in one residual block; `experts` of which two are asked for each token."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts) if experts else None
        networks = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(experts or 1)
        ]
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            each.view(n, length, 4, -1).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mixed(self.norm2(x))

    def mixed(self, x: Tensor) -> Tensor:
        """What the network, or the two experts that the router chooses, make of each token."""
        if self.router is None:
            return self.networks[0](x)
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        result = torch.zeros_like(flat)
        for number, network in enumerate(self.networks):
            rows, place = torch.where(chosen == number)
            result = result.index_add(0, rows, network(flat[rows]) * weights[rows, place, None])
        return result.view_as(x)


class Decoder(nn.Module):
    """A decoder as in nanoGPT."""

    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Dilated(nn.Module):
    """Causal convolutions whose reach doubles, as in WaveNet and TCNs, with weight normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**n))
            for n in range(4)
        )
        self.head = nn.Conv1d(WIDTH, VOCABULARY, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + functional.glu(
                layer(functional.pad(hidden, (layer.dilation[0], 0))), 1
            )
        return self.head(hidden).transpose(1, 2)


class Scan(nn.Module):
    """A linear state space that is scanned step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gates = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.decay, self.head = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.gates(self.embed(x)).chunk(2, -1)
        state, outputs = torch.zeros_like(values[:, 0]), []
        for value, gate in zip(values.unbind(1), gates.sigmoid().unbind(1), strict=True):
            state = state * self.decay.sigmoid() + value * gate
            outputs.append(state)
        return self.head(torch.stack(outputs, 1))


class Speech(nn.Module):
    """Spectra to letters by convolutions and a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(40, WIDTH, 3, stride=2, padding=1)
        self.rnn = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(functional.relu(self.conv(x)).transpose(1, 2))[0]).log_softmax(-1)


def spectra(n: int) -> Batch:
    """Spectra [n, 40, 64], letters, and how many of both count."""
    lengths = torch.full((n,), 32), torch.full((n,), 8)
    return {
        "x": torch.randn(n, 40, 64),
        "y": torch.randint(1, 32, (n, 8)),
        "steps": lengths[0],
        "letters": lengths[1],
    }


def ctc_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Graves' loss over all alignments."""
    return functional.ctc_loss(
        model(batch["x"]).transpose(0, 1), batch["y"], batch["steps"], batch["letters"]
    )


def _packed_batch(n: int) -> Batch:
    lengths = torch.arange(n) % LENGTH + 1
    return {"x": tokens(n), "lengths": lengths, "y": torch.arange(n) % 4}


def _packed_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"], batch["lengths"]), batch["y"])


def _workload(
    model: Callable[[], nn.Module], batch: Any = next_token, loss: Any = token_loss
) -> autofit.Workload:
    return autofit.Workload(model=model, batch=batch, loss=loss, effective_batch_size=BATCH)


def lstm() -> autofit.Workload:
    return _workload(lambda: Recurrent(nn.LSTM, dropout=0.1))


def gru() -> autofit.Workload:
    return _workload(lambda: Recurrent(nn.GRU, bidirectional=True))


def rnn() -> autofit.Workload:
    return _workload(lambda: Recurrent(nn.RNN))


def lstm_cells() -> autofit.Workload:
    return _workload(Cells)


def packed_gru() -> autofit.Workload:
    return _workload(Packed, _packed_batch, _packed_loss)


def attention_seq2seq() -> autofit.Workload:
    return _workload(Attending, pairs, pair_loss)


def transformer_encoder() -> autofit.Workload:
    return _workload(Encoder)


def transformer() -> autofit.Workload:
    return _workload(Translator, pairs, pair_loss)


def decoder() -> autofit.Workload:
    return _workload(Decoder)


def mixture_of_experts() -> autofit.Workload:
    return _workload(lambda: Decoder(experts=4))


def dilated_convolutions() -> autofit.Workload:
    return _workload(Dilated)


def state_space() -> autofit.Workload:
    return _workload(Scan)


def speech_ctc() -> autofit.Workload:
    return _workload(Speech, spectra, ctc_loss)
