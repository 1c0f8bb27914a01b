"""Packed sequences on fake tensors: PyTorch's own code for them reads the memory of the tensor of
their lengths.

The same operators in Python, which read those numbers as any code does: they are of the batch, and
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_State = list[Tensor]  # the hidden state, and an LSTM's memory
# (multiplied inputs of a step, state, weights) -> state.
_Cell = Callable[[Tensor, _State, list[Tensor]], _State]


def packed_operators() -> Iterator[tuple[str, Callable[..., Any]]]:
    """By the name in `torch._VF`, what takes its place."""
    yield "_pack_padded_sequence", _Packed.apply
    yield "_pad_packed_sequence", _padded
    for name in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
        yield name, _layer(name, getattr(torch._VF, name))


class _Packed(torch.autograd.Function):
    """[batch, steps, ...], or steps first, and decreasing lengths -> what counts of each step, one
    after the other, and in how many sequences each step is (PackedSequence.cpp,
    _pack_padded_sequence)."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        lengths: Tensor,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.batch_first = batch_first
        ctx.shape = inputs.shape
        if batch_first:
            ctx.shape = inputs.transpose(0, 1).shape

        known = lengths.tolist()
        ctx.sizes = [sum(length > step for length in known) for step in range(known[0])]
        sizes = torch.tensor(ctx.sizes)
        ctx.mark_non_differentiable(sizes)

        return inputs.new_empty((sum(known), *inputs.shape[2:])), sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = gradients[0].new_zeros(ctx.shape)
        for step, part in enumerate(gradients[0].split(ctx.sizes)):
            inputs[step, : len(part)].copy_(part)
        if ctx.batch_first:
            inputs = inputs.transpose(0, 1)

        return inputs, None, None


def _padded(
    data: Tensor,
    sizes: Tensor,
    batch_first: bool,
    value: float,
    total: int,
) -> tuple[Tensor, Tensor]:
    """The inverse (_pad_packed_sequence)."""
    known = sizes.tolist()
    padded = data.new_full(
        (max(total, len(known)), known[0], *data.shape[1:]),
        value,
    )
    step = 0
    start = 0
    for size, run in groupby(known):
        steps = len(list(run))
        part = data[start : start + steps * size].view(steps, size, *data.shape[1:])
        padded[step : step + steps, :size].copy_(part)
        step += steps
        start += steps * size

    lengths = torch.tensor([sum(size > number for size in known) for number in range(known[0])])
    if batch_first:
        padded = padded.transpose(0, 1)

    return padded, lengths


def _layer(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Recurrent layers of one kind, as on the CPU: all inputs are multiplied at once (RNN.cpp,
    PackedLayer)."""
    cell = _CELLS[name]

    def layers(*args: Any) -> Any:
        if not isinstance(args[3], Sequence):  # after the lengths and the state come the weights
            return plain(*args)

        data, lengths, state, weights, _, count, dropout, training, bidirectional = args
        sizes = lengths.tolist()
        directions = 1 + bidirectional
        states = state if isinstance(state, Sequence) else (state,)
        of_each = len(weights) // (count * directions)
        ends = []
        for number in range(count):
            outputs = []
            for index in range(number * directions, (number + 1) * directions):
                start = [part[index] for part in states]
                own = weights[index * of_each : (index + 1) * of_each]
                run = _backwards if index % directions else _forwards

                output, end = run(
                    cell,
                    data,
                    sizes,
                    start,
                    own,
                )
                outputs.append(output)
                ends.append(end)

            data = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and training and number < count - 1:
                data = functional.dropout(data, dropout)

        return data, *(torch.stack(parts) for parts in zip(*ends, strict=True))

    return layers


def _forwards(
    cell: _Cell,
    data: Tensor,
    sizes: list[int],
    state: _State,
    weights: list[Tensor],
) -> tuple[Any, _State]:
    outputs = []
    ended = []
    for step in _steps(data, sizes, weights):
        if len(step) < len(state[0]):  # some sequences have ended
            ended.append([part[len(step) :] for part in state])
            state = [part[: len(step)] for part in state]

        state = cell(step, state, weights)
        outputs.append(state[0])

    ends = zip(*reversed([*ended, state]), strict=True)

    return torch.cat(outputs), [torch.cat(parts) for parts in ends]


def _backwards(
    cell: _Cell,
    data: Tensor,
    sizes: list[int],
    start: _State,
    weights: list[Tensor],
) -> tuple[Any, _State]:
    outputs = []
    state = [part[: sizes[-1]] for part in start]
    for step in _steps(data, sizes, weights, last_first=True):
        if len(step) > len(state[0]):  # longer ones begin
            more = [part[len(state[0]) : len(step)] for part in start]
            state = [torch.cat(parts) for parts in zip(state, more, strict=True)]

        state = cell(step, state, weights)
        outputs.append(state[0])

    return torch.cat(outputs[::-1]), state


def _steps(
    data: Tensor,
    sizes: list[int],
    weights: list[Tensor],
    *,
    last_first: bool = False,
) -> Iterator[Tensor]:
    """Each cut when its turn comes: a backward goes the other way, and sums gradients as large as
    all inputs."""
    inputs = functional.linear(data, weights[0], *weights[2:3])
    places = list(zip(accumulate(sizes), sizes, strict=True))
    if last_first:
        places.reverse()

    for end, size in places:
        yield inputs[end - size : end]


def _gru(step: Tensor, state: _State, weights: list[Tensor]) -> _State:
    inputs = step.unsafe_chunk(3, 1)
    hidden = _of_state(state, weights).unsafe_chunk(3, 1)
    reset, update = (hidden[gate].add_(inputs[gate]).sigmoid_() for gate in range(2))
    new = inputs[2].add(hidden[2].mul_(reset)).tanh_()

    return [(state[0] - new).mul_(update).add_(new)]


def _lstm(step: Tensor, state: _State, weights: list[Tensor]) -> _State:
    gates = _of_state(state, weights).add_(step).unsafe_chunk(4, 1)
    keep, forget, output = (gates[gate].sigmoid_() for gate in (0, 1, 3))
    memory = (forget * state[1]).add_(keep * gates[2].tanh_())
    hidden = output * memory.tanh()
    projected = hidden
    if len(weights) % 2:  # the last one projects
        projected = functional.linear(hidden, weights[-1])

    return [projected, memory]


def _of_state(state: _State, weights: list[Tensor]) -> Tensor:
    return functional.linear(state[0], weights[1], *weights[3:4])


def _rnn(activate: str, step: Tensor, state: _State, weights: list[Tensor]) -> _State:
    return [getattr(_of_state(state, weights).add_(step), activate)()]


_CELLS: dict[str, _Cell] = {"gru": _gru, "lstm": _lstm}
_CELLS["rnn_tanh"] = partial(_rnn, "tanh_")
_CELLS["rnn_relu"] = partial(_rnn, "relu_")
