"""torch.compile on fake tensors: what a compiled function keeps for its backward, and what its kernels materialise.

Dynamo does not run under a dispatch mode, so a function is captured by AOTAutograd alone, with Inductor's
decompositions and the partitioner that Inductor uses. Its graphs are then played node by node as the kernels would
allocate: pointwise operators and reductions are fused, so only what leaves a kernel gets memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

# Operators with kernels of their own: their inputs and outputs are memory. All others fuse.
_KERNELS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "dequantize_4bit",
    "convolution",
    "embedding_dense_backward",
)


class Compiled:
    """Runs modules of one kind as one compiled code, captured once for each pattern of arguments."""

    def __init__(self) -> None:
        self._captured: dict[Any, Callable[..., Any]] = {}

    def __call__(self, module: nn.Module, *arguments: torch.Tensor) -> Any:
        held = dict(module.named_parameters())
        tensors = (*held.values(), *arguments)
        key = (
            type(module),
            *((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors),
        )
        if key not in self._captured:
            self._captured[key] = _captured(module, list(held))
            # A capture is no part of the run: neither those who watch it nor checkpointing may see its tensors.
            with (
                _disable_current_modes(),
                _fake_mode_of(arguments),
                saved_tensors_hooks(_same, _same),
            ):
                self._captured[key](list(held.values()), *arguments)
        return self._captured[key](list(held.values()), *arguments)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _fake_mode_of(arguments: tuple[torch.Tensor, ...]) -> Any:
    return next(
        (each.fake_mode for each in arguments if isinstance(each, FakeTensor)), nullcontext()
    )


def _captured(module: nn.Module, names: list[str]) -> Callable[..., Any]:
    def plain(values: list[torch.Tensor], *arguments: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), arguments)

    return aot_function(  # type: ignore[no-any-return]
        plain,
        fw_compiler=_player,
        bw_compiler=_player,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def _player(graph: GraphModule, _: Any) -> Callable[..., Any]:
    played: Any = _Played(graph)
    played._boxed_call = True  # AOTAutograd then gives its arguments in a list that may be emptied
    return played  # type: ignore[no-any-return]


class _Played:
    """A graph as a sequence of allocations."""

    def __init__(self, graph: GraphModule) -> None:
        self._nodes = list(graph.graph.nodes)
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._own = {node for node in self._nodes if _has_kernel(node)}
        results = self._nodes[-1].all_input_nodes
        self._memory = {
            node
            for node in self._nodes
            if node in results or any(user in self._own for user in node.users)
        }
        self._last = {used: node for node in self._nodes for used in node.all_input_nodes}

    def __call__(self, arguments: list[Any]) -> Any:
        """Results of the graph; each argument is let go after its last use."""
        known = dict(zip(self._placeholders, arguments, strict=True))
        arguments.clear()
        for node in self._nodes[len(known) : -1]:
            known[node] = self._result(node, known)
            for used in node.all_input_nodes:
                if self._last[used] is node:
                    del known[used]
        return tree_map(
            lambda each: known[each] if isinstance(each, Node) else each, self._nodes[-1].args[0]
        )

    def _result(self, node: Node, known: dict[Node, Any]) -> Any:
        """A tensor with memory, or None for what only exists inside a kernel."""
        inputs = [known[each] for each in node.all_input_nodes]
        view = (
            getattr(node.target, "is_view", False)
            or getattr(node.target, "__name__", "") == "getitem"
        )
        if (node in self._own or view) and all(each is not None for each in inputs):
            look = lambda each: known[each] if isinstance(each, Node) else each  # noqa: E731
            return node.target(*tree_map(look, node.args), **tree_map(look, node.kwargs))  # type: ignore[operator]
        value = node.meta["val"]
        if node not in self._memory or not isinstance(value, torch.Tensor):
            return None
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _has_kernel(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _KERNELS
