"""Sharding: a model's weights divided over ranks, by FSDP2 and layer by layer, or held by each under DDP; and undone.

Both change classes of modules and install hooks that nothing in PyTorch takes back: what they changed is noted before,
so that a user's model can be returned as it came.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules.batchnorm import _NormBase

from autofit.core.errors import RefusedError
from autofit.distributed import Ranks
from autofit.setup.layers import output_head, repeated_blocks
from autofit.setup.split_layers import WHOLE, Styles, check_alike, norm_of, split_layers, styles_of
from autofit.setup.state import Setup

_REDUCED = {
    f"{name}-mixed": MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
    for name, low in (("bf16", torch.bfloat16), ("fp16", torch.float16))
}

_MIXED = "mixed torch.Tensor and DTensor"
_MISFITS = (
    f"{_MIXED}|must match the size|same reduction dim|Sharding "
    f"propagation|_ToTorchTensor|invalid for input of size"
)
NEW_ENOUGH = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # PyTorch 2.13


def sharded(setup: Setup, *, checked: bool = False) -> None:
    """Divide the weights as they are made: layers are split, and what is left of a block is gathered when it is used.
    `checked`: the plan for split layers is known to be complete."""
    config = setup.config
    model = setup.model
    exchange = setup.exchange
    styles = styles_of(setup) if setup.ranks.layout.tensor > 1 else {}
    _divide_when_made(setup, styles)
    exchange.reshard = partial(_reshard, model)
    exchange.after_backward += _statistics(setup)

    if config.data_parallel == "fsdp":
        message = "fsdp does not fit this model, whose code computes with weights of layers that it does not call"
        setup.step_contexts.append(
            partial(_told_of_code, _MIXED, f"data_parallel: {message}; use ddp.")
        )
        exchange.sync_gradients = partial(_sync, model, is_deferred=bool(config.lora_rank))
    if _drops_layers(model):
        message = "the model drops whole layers at random (layerdrop), and each device would wait for others of them"
        raise RefusedError(
            f"data_parallel: {message}; set it to 0 in the model's config, or use ddp."
        )

    if styles:
        message = f"the code of {type(model).__name__} does not follow the plan that transformers has for it"
        setup.step_contexts.append(
            partial(_told_of_code, _MISFITS, f"tensor_parallel: {message}; {WHOLE}.")
        )
    if styles and not checked:
        norms: dict[nn.Parameter, torch.Tensor] = {}
        exchange.after_backward.append(partial(check_alike, setup, norms))
        if config.optimizer_in_backward:
            setup.weights.on_materialized.append((model, partial(_note_norms, setup, norms)))

    if may_skip(model):
        if styles:
            name = f"the code of {type(model).__name__} may leave out layers"
            raise RefusedError(
                f"tensor_parallel: {name}, and was not tried with split ones; {WHOLE}."
            )
        if NEW_ENOUGH:
            setup.weights.on_materialized.append((model, partial(_watch_reached, setup)))


def _divide_when_made(setup: Setup, styles: Styles) -> None:
    """Have each block divided when its weights are made, and the rest with the root. The root's group stays gathered
    from the forward to the end of the backward, so embedding and head, the largest weights outside of blocks, are
    groups of their own."""
    mesh = setup.ranks.mesh
    config = setup.config
    model = setup.model
    assert mesh is not None, "one device shards nothing"
    offload = OffloadPolicy()
    if config.fsdp_offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=setup.device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if setup.ranks.layout.replicate > 1 else mesh["shard"],
        "mp_policy": _REDUCED.get(config.precision, MixedPrecisionPolicy()),
        "offload_policy": offload,
    }

    rest = dict.fromkeys(model.modules())
    uses = _uses(rest)
    head = output_head(model)
    for group in (*_called(repeated_blocks(model)), *_large_ends(setup)):
        parts = list(group.modules())
        is_alone = all(uses[parameter] == count for parameter, count in _uses(parts).items())
        if not is_alone or not rest.keys() >= set(parts):
            continue  # tied weights are the root's, an embedding in a block is the block's

        # until the loss, which multiplies by its weight
        stays = group is head and config.loss != "standard"
        own = {**options, "reshard_after_forward": False if stays else config.reshard_after_forward}
        setup.weights.on_materialized.append(
            (group, partial(_divide, setup, group, parts, styles, own))
        )
        for module in parts:
            rest.pop(module)

    options["reshard_after_forward"] = False
    setup.weights.on_materialized.append(
        (model, partial(_divide, setup, model, list(rest), styles, options))
    )


@contextmanager
def _told_of_code(words: str, sentence: str) -> Iterator[None]:
    """Tell in a sentence what PyTorch has its own words for: a model's code does not meet what it expects."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(words, str(error)):
            raise
        raise RefusedError(sentence) from error


def _note_norms(setup: Setup, norms: dict[nn.Parameter, torch.Tensor]) -> None:
    """Note the norms of gradients before the backward applies and frees them."""

    def note(weight: Any) -> None:
        if weight not in norms:
            norms[weight] = norm_of(weight)

    for _, weight in setup.trainable():
        setup.on_close(weight.register_post_accumulate_grad_hook(note).remove)


def _sync(model: Any, is_last: bool, *, is_deferred: bool) -> None:
    """Say before a micro-batch whether its gradients are reduced.

    Those of all weights are, in each: to wait for the last one keeps whole gradients. Measured on a Llama of 8 layers,
    4 micro-batches, 2 ranks: tracked bytes at the peak and reduce-scatters of a step:

        all weights             each 24.2 MB, 44    last 27.8 MB, 11
        adapters                each 11.2 MB, 32    last 11.4 MB, 8
        replicas of shards      each 25.3 MB, and 22 all-reduces of 2 micro-batches; these in the last 24.2 MB, 11

    What is reduced has the gradients' dtype: bf16 beside `bf16` weights, fp32 beside mixed precision.
    """
    if is_deferred:
        model.set_requires_gradient_sync(is_last)
    else:
        model.set_requires_all_reduce(is_last)


def _called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules themselves, or what lists among them hold, which are not called."""
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _called(module.children())
        else:
            yield module


def _uses(modules: Iterable[nn.Module]) -> Counter[nn.Parameter]:
    """How many of some modules hold each parameter."""
    uses: Counter[nn.Parameter] = Counter()
    for module in modules:
        uses.update(parameter for parameter in module._parameters.values() if parameter is not None)
    return uses


def _divide(
    setup: Setup, group: nn.Module, parts: list[nn.Module], styles: Styles, options: dict[str, Any]
) -> None:
    """Divide what the parts of a module hold, and free the whole. Weights without rows stay whole."""
    given = [(module, dict(module._parameters)) for module in parts]
    own = _uses(parts)
    without_rows = [parameter for parameter in own if not parameter.dim() or not parameter.numel()]
    trained = [parameter for parameter in without_rows if parameter.requires_grad]
    if trained:
        if setup.config.optimizer_in_backward or setup.config.precision == "fp16-mixed":
            message = "updates in the backward and fp16-mixed do not know a weight without rows, as the model has,"
            raise RefusedError(f"data_parallel: {message} beside fsdp; leave them out, or use ddp.")
        setup.exchange.after_backward.append(partial(_average, setup.ranks, trained))

    for weight in own:
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
    setup.on_close(partial(_take_away, [_Given(module) for module in parts]))
    split_layers(setup, parts, styles)
    if setup.config.data_parallel == "fsdp":
        fully_shard(group, **options, ignored_params=set(without_rows))
    setup.on_close(partial(_put_together, given))

    for module, parameters in given:
        for name, parameter in parameters.items():
            if parameter is not None and module._parameters[name] is not parameter:
                parameter.data = parameter.data.new_empty(0)  # whoever still holds it


def _watch_reached(setup: Setup) -> None:
    """Have weights that only some ranks' losses reach count as zeros in the others: the sums of gradients would not fit
    each other. What no rank reaches keeps no gradient, so that no optimizer steps it."""
    model: Any = setup.model
    model.set_reduce_scatter_unused_params(True)
    slots: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                slots.append((module, name))
    watched: set[int] = set()
    reached: set[int] = set()

    def watch(*_: Any) -> None:
        """Once a weight was gathered, it stays one tensor, whose gradients call a hook."""
        if len(watched) == len(slots):
            return
        for number, (module, name) in enumerate(slots):
            parameter = module._parameters[name]
            if (
                number not in watched
                and parameter is not None
                and not isinstance(parameter, DTensor)
            ):
                watched.add(number)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: reached.add(number)
                )

    def counts() -> list[float]:
        found = [float(number in reached) for number in range(len(slots))]
        reached.clear()
        return found

    def drop_rest(anywhere: list[float]) -> None:
        for (module, name), is_reached in zip(slots, anywhere, strict=True):
            parameter = module._parameters[name]
            if not is_reached and parameter is not None:
                parameter.grad = None

    for module in model.modules():
        if isinstance(module, FSDPModule):
            setup.on_close(module.register_forward_pre_hook(watch).remove)
    setup.exchange.extra_reductions.append((counts, drop_rest))


def replicated(setup: Setup, reached: Set[nn.Parameter]) -> None:
    """Average gradients over ranks that hold all weights, in the last micro-batch of a step only: they are whole
    anyway. Weights that a first look has not `reached` wait until the backward is over."""
    # DistributedDataParallel by hooks: its usual wrapper would hide the model's attributes from the user's loss.
    from torch.distributed._composable.replicate import replicate

    model: Any = setup.model
    trained = [parameter for _, parameter in setup.trainable()]
    reached_anywhere = setup.ranks.largest(*(float(parameter in reached) for parameter in trained))
    rest = [
        parameter
        for parameter, is_reached in zip(trained, reached_anywhere, strict=True)
        if not is_reached
    ]
    setup.on_close(partial(_take_away, [_Given(module) for module in model.modules()]))

    # They hold the same weights already, some of which may rest on the host, where DDP would not find them.
    replicate(
        model, gradient_as_bucket_view=True, find_unused_parameters=may_skip(model), init_sync=False
    )
    for parameter in rest:
        parameter.requires_grad_(False)
    replicate.state(model).lazy_init()  # takes what is trained at this moment
    for parameter in rest:
        parameter.requires_grad_(True)

    exchange = setup.exchange
    exchange.sync_gradients = model.set_requires_gradient_sync
    if rest:
        exchange.after_backward.append(partial(_average, setup.ranks, rest))
    exchange.after_backward += _statistics(setup)


def may_skip(model: nn.Module) -> bool:
    """Whether a loss may leave out weights that another one reaches, for which DDP must walk the graph in every step
    (0.3 ms of 28 in a Llama of 24 tiny layers): a model whose code is not known, experts that are modules of their own,
    and layers that are dropped whole."""
    if not type(model).__module__.startswith("transformers.") or _drops_layers(model):
        return True

    for name, module in model.named_modules():
        if name.endswith("experts") and isinstance(module, nn.ModuleList | nn.ModuleDict):
            return True
    return False


def _drops_layers(model: Any) -> bool:
    if not type(model).__module__.startswith("transformers."):
        return False
    return any(value for name, value in model.config.to_dict().items() if "layerdrop" in name)


def _statistics(setup: Setup) -> Iterator[Callable[[], Any]]:
    """Average running statistics, so that the model is one; each rank's norms see only its own samples."""
    ranks = setup.ranks
    norms = [
        module
        for module in setup.model.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]

    def average() -> None:
        buffers = [
            buffer for norm in norms for buffer in norm.buffers() if buffer.is_floating_point()
        ]
        flat = ranks.sum_of(torch.cat([buffer.flatten() for buffer in buffers])).div_(
            ranks.layout.world
        )

        start = 0
        for buffer in buffers:
            stop = start + buffer.numel()
            buffer.copy_(flat[start:stop].view_as(buffer))
            start = stop

    if norms:
        yield average


def _average(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """Average the gradients of weights that some rank has one of, in the others as zeros."""
    has_some = ranks.largest(*(float(parameter.grad is not None) for parameter in parameters))
    for parameter, has_any in zip(parameters, has_some, strict=True):
        if has_any:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = ranks.sum_of(gradient).div_(ranks.layout.world)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all ranks, who call this together; along one dimension of the mesh after the other,
    because PyTorch warns of two at a time."""
    if not isinstance(tensor, DTensor):
        return tensor

    joined = tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        joined = joined.redistribute(placements=placements)
    local: torch.Tensor = joined.to_local()
    return local


def _large_ends(setup: Setup) -> Iterator[nn.Module]:
    """Embedding and head, where each is called as a layer."""
    embedding: nn.Module | None = None
    get_embedding = getattr(setup.model, "get_input_embeddings", None)
    if get_embedding:
        with suppress(NotImplementedError):  # a model of images or sound
            embedding = get_embedding()

    for end in (embedding, output_head(setup.model)):
        if end is not None and hasattr(end, "weight"):
            yield end


def _reshard(model: nn.Module) -> None:
    """Give up gathered weights, which a forward without a backward leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _Given:
    """A module's class, attributes and hooks, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind = module.__class__
        self.attributes = set(vars(module))
        self.hooks = [set(hooks) for hooks in _hooks_of(module)]


def _take_away(given: list[_Given]) -> None:
    for before in given:
        module = before.module
        module.__class__ = before.kind
        for hooks, known in zip(_hooks_of(module), before.hooks, strict=True):
            for key in hooks.keys() - known:
                del hooks[key]
        for name in vars(module).keys() - before.attributes:
            delattr(module, name)


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    yield from (module._forward_pre_hooks, module._forward_hooks)
    yield from (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs)


def _put_together(given: list[tuple[nn.Module, dict[str, nn.Parameter | None]]]) -> None:
    """Gather the weights again, in the parameters that the model came with."""
    done: set[nn.Parameter] = set()
    for module, _ in given:
        if isinstance(module, FSDPModule):
            module.reshard()
    for module, parameters in given:
        for name, parameter in parameters.items():
            held = module._parameters[name]
            if parameter is not None and parameter not in done and isinstance(held, DTensor):
                parameter.data = whole(held.data).detach()
                parameter.grad = None
                done.add(parameter)
            module._parameters[name] = parameter
