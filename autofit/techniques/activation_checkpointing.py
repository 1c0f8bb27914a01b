"""activation_checkpointing: keep less of the forward for the backward, and compute the rest again there.

Chen et al. 2016, arXiv 1604.06174; keeping the dear operators' outputs: Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autofit.core.config import Config, Value
from autofit.core.errors import RefusedError
from autofit.core.hardware import Hardware
from autofit.core.workload import Workload
from autofit.setup import Setup, Stage, Technique
from autofit.setup.blocks import repeated_blocks

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_NO_BLOCKS = "the model has no repeated blocks (a ModuleList or Sequential of layers) to checkpoint; use none."
_BUDGET = "budget-"
_FULL = "keeps_only_what_enters"  # the mark on a forward that is checkpointed so
_DRAWS = (
    "with dropout the compiler would draw other random numbers in the backward than in the forward (pytorch 190758)"
)
_USE_ANOTHER = "use full, alternate or selective."
# What `selective` keeps, by the operators' names without their overloads: products, convolutions, and attention in
# every form PyTorch, flash-attn and xFormers give it. All else is cheap to compute again.
_KEPT = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_int_mm"),
        *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
    )
)
_KEPT_PARTS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "flex_attention")


class ActivationCheckpointing(Technique):
    """What is kept of a repeated block for the backward.

    `full`: what enters it. `alternate`: the same for every second block, never the last, and all of the others.
    `selective`: what enters it, and the outputs of matrix products, convolutions and attention. `budget-F`: the
    compiler chooses what to compute again so that at most the share F of what it would keep remains; a knapsack by
    arithmetic cost, whose peak does not always fall with F (pytorch issue 197838).
    """

    name = "activation_checkpointing"
    stage = Stage.BLOCKS
    off = "none"
    values = ("none", "selective", "alternate", "full", "budget-0.25", "budget-0.5", "budget-0.75")

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        """Budgets are for the compiler, which is not searched on a CPU."""
        if hardware.device == "cuda":
            return self.values
        return tuple(value for value in self.values if not str(value).startswith(_BUDGET))

    def exact(self, value: Value, workload: Workload) -> bool:
        return True

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = str(config[self.name])
        if value.startswith(_BUDGET):
            if config["compile"] == "none":
                return f"{value} is kept by the compiler; set compile default."
            draws = config["lora_dropout"] or (workload.traits and workload.traits.dropout)
            return f"{_DRAWS}; {_USE_ANOTHER}" if draws else None
        if value != self.off and workload.traits and not workload.traits.blocks:
            return _NO_BLOCKS
        return None

    def memory_order(self, value: Value) -> int | None:
        """Shown for the networks of the tests, not for any: a block whose forward needs more for a moment, without
        gradients, than all other blocks keep would need that memory again beside the gradients. `alternate` has no
        order for that reason: of two blocks it computes the first one again, where `full` computes both (a Llama with
        tied embeddings in bf16: 0.3 % less)."""
        return {"full": 0, "none": 1}.get(str(value))

    def apply(self, setup: Setup, value: Value) -> None:
        value = str(value)
        if value.startswith(_BUDGET):
            _budget(setup, float(value.removeprefix(_BUDGET)))
            return
        blocks = repeated_blocks(setup.model)
        if not blocks:
            raise RefusedError(_NO_BLOCKS)
        _stop_caching(setup)
        for block in _every_second(blocks) if value == "alternate" else blocks:
            if value == "full" and hasattr(block.forward, _FULL):
                continue  # of `alternate`, where a run that ran out of memory goes on with `full`
            setup.on_close(_checkpoint(block, selective=value == "selective"))
        if value == "selective":
            setup.step_contexts.append(_changes_in_place_refused)

    def trace(self, setup: Setup, value: Value) -> None:
        """Nothing is compiled there, and generators of random numbers have no state to compare."""
        if not str(value).startswith(_BUDGET):
            self.apply(setup, value)


def _every_second(blocks: list[nn.Module]) -> list[nn.Module]:
    """Never the last: its inside would be there again at once, while all that others keep is still there."""
    return blocks[len(blocks) % 2 :: 2]


def _budget(setup: Setup, share: float) -> None:
    """Around every step: graphs are partitioned when they first run, and only those of this run."""
    config: Any = torch._functorch.config
    setup.step_contexts.append(lambda: config.patch(activation_memory_budget=share))
    setup.step_contexts.append(lambda: _random_numbers_refused(setup.device))


@contextmanager
def _random_numbers_refused(device: torch.device) -> Iterator[None]:
    """Gradients were seen to be wrong by 40 % and more, without a word, where what a budget leaves to the backward
    holds a dropout. No trait tells of dropout that is called as a function; the generator does."""
    before = _random_state(device)
    yield
    if not torch.equal(before, _random_state(device)):
        raise RefusedError(f"{_DRAWS}.", _USE_ANOTHER.capitalize())


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _checkpoint(block: nn.Module, *, selective: bool) -> Callable[[], None]:
    """Wrap the block's forward; returns what takes that back."""
    own = block.__dict__.get("forward")  # of an instance somebody else has wrapped already
    inner = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    policy = _policy if selective else _nothing_kept

    def contexts() -> Contexts:
        tracing = torch._guards.TracingContext.try_get() is not None
        if not selective and not tracing:
            return nullcontext(), _statistics_held(norms)
        first, again = create_selective_checkpoint_contexts(policy)
        # A compiler takes from the first which operators to compute again, wants the second as it came, and updates
        # statistics once. A block that it gave up comes here later, as plain code.
        return first, again if tracing else _recomputing(again, norms)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    if not selective:
        setattr(forward, _FULL, True)
    block.forward = forward  # the instance's own attribute, over the class's method
    return functools.partial(setattr, block, "forward", own) if own else functools.partial(delattr, block, "forward")


def _nothing_kept(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition(".")[0]
    kept = name in _KEPT or any(part in name for part in _KEPT_PARTS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _recomputing(context: AbstractContextManager[Any], norms: list[_NormBase]) -> Iterator[None]:
    with context, _statistics_held(norms):
        yield


@contextmanager
def _statistics_held(norms: list[_NormBase]) -> Iterator[None]:
    """Let a recomputation leave running statistics alone: the forward has counted these samples already."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count


@contextmanager
def _changes_in_place_refused() -> Iterator[None]:
    """An output that is kept must stay as it was; torch notices in the backward when an operator changed it."""
    try:
        yield
    except RuntimeError as error:
        if "selective activation checkpoint has been mutated" not in str(error):
            raise
        message = "the model changes the output of a matrix product or attention in place (ReLU with inplace=True?)."
        raise RefusedError(message, "Use activation_checkpointing full or alternate.") from error


def _stop_caching(setup: Setup) -> None:
    """A key/value cache filled in the forward would be filled again in the recomputation, with other shapes.

    A decoder beside an encoder (T5) goes by a config of its own.
    """
    configs: dict[int, Any] = {
        id(module.config): module.config for module in setup.model.modules() if "config" in vars(module)
    }
    for config in configs.values():
        if getattr(config, "use_cache", False):
            config.use_cache = False
            setup.on_close(functools.partial(setattr, config, "use_cache", True))
