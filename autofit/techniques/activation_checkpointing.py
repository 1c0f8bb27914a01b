"""activation_checkpointing: save less of the forward for the backward, and recompute the rest
there.

Chen et al. 2016, arXiv 1604.06174; saving the expensive operators' outputs: Korthikanti et al.
2022, arXiv 2205.05198.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autofit.core.knobs.activation_checkpointing import BUDGET, KNOB, ways_of_blocks
from autofit.setup import Config, Hardware, RefusedError, Setup, Stage, Technique, Value, Workload
from autofit.setup.layers import repeated_blocks

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_NO_BLOCKS = "the model has no repeated blocks (a ModuleList or Sequential of layers) to checkpoint; use none."
_FULL = "fully_checkpointed"  # marks a forward that is checkpointed as by `full`
_DRAWS = (
    "with dropout the compiler would draw different random numbers in backward and forward "
    "(pytorch 190758)"
)
_USE_ANOTHER = "use full, alternate or selective."
# What `selective` saves, by the operators' names without overloads: products, convolutions, and
# attention in every form that PyTorch, flash-attn and xFormers have. All else is cheap to recompute.
_SAVED = {
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_int_mm"),
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
}
_SAVED_PARTS = (
    "scaled_dot_product",
    "flash_attn",
    "flash_attention",
    "efficient_attention",
    "flex_attention",
)


class ActivationCheckpointing(Technique):
    """What each repeated block saves for the backward.

    - `full`: its input.
    - `alternate`: every second block its input, the others (always the last) everything.
    - `selective`: its input, and the outputs of matrix products, convolutions and attention.
    - `full:N`: the first N blocks, whose backward comes last, when what the others saved is gone,
      their inputs; the rest everything, or with `full:N+selective` what `selective` says.
    - `budget-F`: the compiler recomputes until at most the share F of what it would save remains; a
      knapsack by arithmetic cost, whose peak does not always fall with F (pytorch issue 197838).
    """

    record = KNOB
    stage = Stage.BLOCKS
    # for the compiler, which is not searched on a CPU
    cuda_values = ("budget-0.25", "budget-0.5", "budget-0.75")
    all_exact = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """`none` where no gradient reaches a block; one word where all blocks are alike."""
        return self.off if config.head_only else self.in_one_word(config, workload)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value = str(config[self.name])
        if value.startswith(BUDGET):
            if config.compile == "none":
                return f"{value} is chosen by the compiler; set compile default."
            if config.optimizer_in_backward and str(config.optimizer).endswith("-sr"):
                return (
                    f"{config.optimizer} draws random numbers, and would in the backward; "
                    f"{_USE_ANOTHER}"
                )
            if config.lora_dropout or (workload.traits and workload.traits.dropout):
                return f"{_DRAWS}; {_USE_ANOTHER}"
            return None

        if value != self.off and workload.traits and not workload.traits.blocks:
            return _NO_BLOCKS
        return None

    def apply(self, setup: Setup, value: Value) -> None:
        value = str(value)
        if value.startswith(BUDGET):
            # Around every step: graphs are partitioned when they first run, and only those of this
            # run.
            config: Any = torch._functorch.config
            share = float(value.removeprefix(BUDGET))
            setup.step_contexts.append(lambda: config.patch(activation_memory_budget=share))
            setup.step_contexts.append(lambda: _random_numbers_refused(setup.device))
            return

        blocks = repeated_blocks(setup.model)
        if not blocks:
            raise RefusedError(_NO_BLOCKS)
        ways = ways_of_blocks(value, len(blocks))
        trained_alone = getattr(setup.model, "checkpoints_trained_alone", False)

        for block, way in zip(blocks, ways, strict=True):
            if way == self.off or (trained_alone and not _is_trained(block)):
                continue
            # By the value before, where a run that ran out of memory goes on with `full`.
            if way == "full" and hasattr(block.forward, _FULL):
                continue
            _checkpoint(setup, block, selective=way == "selective")

        if "selective" in ways:
            setup.step_contexts.append(_changes_in_place_refused)

    def trace(self, setup: Setup, value: Value) -> None:
        """A trace compiles nothing, and its random number generators have no state to compare."""
        if not str(value).startswith(BUDGET):
            self.apply(setup, value)


@contextmanager
def _random_numbers_refused(device: torch.device) -> Iterator[None]:
    """Gradients were silently wrong by 40 % and more where a budget left a dropout to the backward.

    Traits do not show dropout that is called as a function; the generator does.
    """

    def random_state() -> torch.Tensor:
        if device.type == "cuda":
            return torch.cuda.get_rng_state(device)
        return torch.get_rng_state()

    before = random_state()
    yield
    if not torch.equal(before, random_state()):
        raise RefusedError(f"{_DRAWS}.", _USE_ANOTHER.capitalize())


def _is_trained(block: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in block.parameters())


def _checkpoint(setup: Setup, block: nn.Module, *, selective: bool) -> None:
    """Wrap the block's forward."""
    inner = block.forward
    norms = [
        module
        for module in block.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]
    policy = _policy if selective else lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Contexts:
        is_compiling = torch._guards.TracingContext.try_get() is not None
        if not selective and not is_compiling:
            return nullcontext(), _statistics_held(norms)

        first, again = create_selective_checkpoint_contexts(policy)
        # A compiler reads from the first which operators to recompute, wants the second unchanged,
        # and updates statistics once. A block that it could not compile runs here later, as plain
        # code.
        if is_compiling:
            return first, again
        return first, _statistics_held(norms, again)

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    if not selective:
        setattr(forward, _FULL, True)
    setup.patch(block, "forward", forward)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition(".")[0].removeprefix("aten::")
    if name in _SAVED or any(part in name for part in _SAVED_PARTS):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _statistics_held(
    norms: list[_NormBase], recomputing: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Keep a recomputation from updating running statistics: the forward has counted these samples
    already."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None

    try:
        with recomputing or nullcontext():
            yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked = count


@contextmanager
def _changes_in_place_refused() -> Iterator[None]:
    """A saved output must not change; torch notices in the backward when an operator changed it."""
    try:
        yield
    except RuntimeError as error:
        if "selective activation checkpoint has been mutated" not in str(error):
            raise
        raise RefusedError(
            "the model changes the output of a matrix product or attention in place (ReLU with "
            "inplace=True?).",
            "Use activation_checkpointing full or alternate.",
        ) from error
