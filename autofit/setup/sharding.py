"""Sharding: a model's weights divided over ranks, by FSDP2 and layer by layer, or held by each
rank under DDP; and the way back.

Both change classes of modules and install hooks that nothing in PyTorch removes. The state before
is noted, so that a user's model can be returned as it came.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Set
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
from autofit.setup.split_layers import Styles, check_alike, norm_of, split_layers, styles_of
from autofit.setup.state import Setup

# By precision, what weights are gathered in that are stored in 32 bits.
LOW_FORMATS = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

# What PyTorch says where a model's code does not meet what FSDP or split layers expect.
_MIXED = "mixed torch.Tensor and DTensor"
_MISFITS = (
    f"{_MIXED}|must match the size|same reduction dim|Sharding propagation|_ToTorchTensor|"
    "invalid for input of size"
)
NEW_ENOUGH = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # PyTorch 2.13


def sharded(setup: Setup, *, traced: bool = False) -> None:
    """Divide the weights as they are made: layers are split, and what is left of a block is
    gathered when the block is used.

    Args:
        traced: the model has no values and is given up after a step: the plan for split layers is
            known to be complete, and nobody needs its weights as they were.

    Raises:
        RefusedError: for a model whose ranks would wait for different layers, or whose layers
            cannot be split.
    """
    config = setup.config
    model = setup.model
    exchange = setup.exchange
    styles = styles_of(setup) if setup.ranks.layout.tensor > 1 else {}

    _divide_when_made(setup, model, styles, restored=not traced)
    if config.data_parallel == "fsdp":
        for frozen in setup.frozen.values():
            _divide_when_made(setup, frozen, {}, restored=not traced)
    exchange.reshard = partial(_reshard, setup.all_models())
    _average_statistics(setup)

    if config.data_parallel == "fsdp":
        refusal = (
            "data_parallel: fsdp does not fit this model, whose code computes with weights of "
            "layers that it does not call; use ddp."
        )
        setup.step_contexts.append(partial(_explain, _MIXED, refusal))
        setup.step_contexts.append(_views_allowed)
        exchange.sync_gradients = partial(_sync, model)
        if config.lora_rank:
            exchange.sync_gradients = _DeferredSync(setup)

    if _drops_layers(model):
        raise RefusedError(
            "data_parallel: the model drops whole layers at random (layerdrop), and each device "
            "would wait for others of them; set it to 0 in the model's config, or use ddp."
        )

    name = type(model).__name__
    if styles:
        refusal = (
            f"tensor_parallel: the code of {name} does not follow the plan that transformers has "
            "for it; use tensor_parallel 1."
        )
        setup.step_contexts.append(partial(_explain, _MISFITS, refusal))

    if styles and not traced:
        norms: dict[nn.Parameter, torch.Tensor] = {}
        exchange.after_backward.append(partial(check_alike, setup, norms))
        if config.optimizer_in_backward:
            setup.weights.on_materialized.append((model, partial(_note_norms, setup, norms)))

    if may_skip(model):
        if styles:
            raise RefusedError(
                f"tensor_parallel: the code of {name} may leave out layers, and was not tried with "
                "split ones; use tensor_parallel 1."
            )
        if NEW_ENOUGH and config.data_parallel == "fsdp":
            setup.weights.on_materialized.append((model, partial(_watch_reached, setup)))


@contextmanager
def _views_allowed() -> Iterator[None]:
    """Keep back PyTorch's warning of modules that give views, as heads that pass hidden states on do, and
    nobody changes those in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        yield


def _divide_when_made(setup: Setup, model: nn.Module, styles: Styles, *, restored: bool) -> None:
    """Have each block of a model divided when its weights are made, and the rest with the root.

    The root's group stays gathered from the forward to the end of the backward, so embedding and
    head, the largest weights outside blocks, are groups of their own.

    Args:
        restored: at the end every rank gets the whole weights back.
    """
    config = setup.config
    common = _fsdp_options(setup)
    rest = dict.fromkeys(model.modules())
    uses = _uses(rest)
    head = output_head(model)
    groups = [*_called(repeated_blocks(model)), *_large_ends(model)]

    for group in groups:
        parts = list(group.modules())
        own = _uses(parts)
        if setup.part is not None and not own:
            continue  # another stage holds them
        is_alone = all(uses[parameter] == count for parameter, count in own.items())
        if not is_alone or not rest.keys() >= set(parts):
            continue  # tied weights are the root's, an embedding in a block is the block's

        reshards = config.reshard_after_forward
        if group is head and config.loss != "standard":
            reshards = False  # until the loss, which multiplies by its weight
        options = {**common, "reshard_after_forward": reshards}
        divide = partial(_divide, setup, group, parts, styles, options, restored=restored)
        setup.weights.on_materialized.append((group, divide))
        for module in parts:
            rest.pop(module)

    options = {**common, "reshard_after_forward": False}
    divide = partial(_divide, setup, model, list(rest), styles, options, restored=restored)
    setup.weights.on_materialized.append((model, divide))


@contextmanager
def _explain(words: str, refusal: str) -> Iterator[None]:
    """Refuse where PyTorch's error shows, by its words, that a model's code does not fit."""
    try:
        yield
    except RuntimeError as error:
        if not re.search(words, str(error)):
            raise
        raise RefusedError(refusal) from error


def _note_norms(setup: Setup, norms: dict[nn.Parameter, torch.Tensor]) -> None:
    """Note the norms of gradients before the backward applies and frees them."""

    def note(weight: Any) -> None:
        if weight not in norms:
            norms[weight] = norm_of(weight)

    for _, weight in setup.trainable():
        setup.on_close(weight.register_post_accumulate_grad_hook(note).remove)


def _sync(model: Any, is_last: bool) -> None:
    """Say before a micro-batch whether its gradients are reduced, of which not all are adapters'.

    Those of all weights are, in each: to wait for the last one keeps whole gradients. Measured on a
    Llama of 8 layers, 4 micro-batches, 2 ranks: tracked bytes at the peak and reduce-scatters of a
    step:

        all weights             each 24.2 MB, 44    last 27.8 MB, 11
        adapters                each 11.2 MB, 32    last 11.4 MB, 8
        replicas of shards      each 25.3 MB, and 22 all-reduces of 2 micro-batches;
                                these in the last 24.2 MB, 11

    What is reduced has the gradients' dtype: bf16 beside `bf16` weights, fp32 beside mixed
    precision.
    """
    model.set_requires_all_reduce(is_last)


class _DeferredSync:
    """Has the gradients of adapters reduced in the last micro-batch.

    Groups that no forward has gathered yet, such as the blocks of a tower that these samples do not
    use, wait for nothing: PyTorch 2.13 looks for their gradients then, and raises AttributeError.
    """

    def __init__(self, setup: Setup) -> None:
        self._model = setup.model
        self._is_last = True
        # Only after a forward is it known what it gathers.
        setup.weights.on_materialized.append((setup.model, partial(self._watch, setup)))

    def __call__(self, is_last: bool) -> None:
        """Say before a micro-batch, or its backward, whether it is the last one."""
        self._is_last = is_last
        self._set()

    def _watch(self, setup: Setup) -> None:
        handle = setup.model.register_forward_hook(lambda *_: self._set())
        setup.on_close(handle.remove)

    def _set(self) -> None:
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                is_reduced = self._is_last or not _is_gathered_once(module)
                module.set_requires_gradient_sync(is_reduced, recurse=False)


def prefetch_as_after(model: nn.Module, forwards: int) -> None:
    """Have FSDP gather ahead in the next backward as if a forward had run so often before it.

    It gathers the group whose forward came before: after several forwards also behind the first
    group of the last one, and nothing after none, which a backward behind another one finds.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = dict.fromkeys(module._get_fsdp_state() for module in sharded)
    groups = [group for state in states for group in state._fsdp_param_groups]
    for group in groups:
        earlier = (forwards - 1) * len(group.comm_ctx.post_forward_order)
        indices = [index + earlier for index in group._post_forward_indices]
        group._post_forward_indices[:] = indices if forwards else []

    for context in {id(group.comm_ctx): group.comm_ctx for group in groups}.values():
        context.post_forward_order *= forwards


def _is_gathered_once(module: FSDPModule) -> bool:
    """Whether the weights of a module's own group were whole before, or there are none."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        if not all(hasattr(weight, "_unsharded_param") for weight in group.fsdp_params):
            return False
    return True


def _called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules themselves; of lists among them, which are not called, what they hold."""
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _called(module.children())
        else:
            yield module


def _uses(modules: Iterable[nn.Module]) -> Counter[nn.Parameter]:
    """How many of some modules hold each parameter."""
    uses: Counter[nn.Parameter] = Counter()
    for module in modules:
        uses.update(module.parameters(recurse=False))
    return uses


def _divide(
    setup: Setup,
    group: nn.Module,
    parts: list[nn.Module],
    styles: Styles,
    options: dict[str, Any],
    *,
    restored: bool,
) -> None:
    """Divide what the parts of a module hold, and free the whole. Weights without rows stay whole.

    Args:
        options: of FSDP, for this group.
        restored: they are gathered again at the end.
    """
    config = setup.config
    given = [(module, dict(module._parameters)) for module in parts]

    own = _uses(parts)
    without_rows = [parameter for parameter in own if not parameter.dim() or not parameter.numel()]
    trained = [parameter for parameter in without_rows if parameter.requires_grad]
    if trained:
        if config.optimizer_in_backward or config.precision == "fp16-mixed":
            raise RefusedError(
                "data_parallel: updates in the backward and fp16-mixed do not know a weight "
                "without rows, as the model has, beside fsdp; leave them out, or use ddp."
            )
        setup.exchange.after_backward.append(partial(_average, setup.ranks, trained))

    for weight in own:
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()

    setup.on_close(partial(_restore_modules, [_ModuleState(module) for module in parts]))
    split_layers(setup, parts, styles)
    if config.data_parallel == "fsdp":
        fully_shard(group, **options, ignored_params=set(without_rows))
    if restored:
        setup.on_close(partial(_restore_weights, given))

    for module, parameters in given:
        for name, parameter in parameters.items():
            if parameter is not None and module._parameters[name] is not parameter:
                parameter.data = parameter.data.new_empty(0)  # whoever still holds it


def _fsdp_options(setup: Setup) -> dict[str, Any]:
    """What FSDP is told of every group alike."""
    config = setup.config
    mesh = setup.ranks.mesh
    assert mesh is not None, "one device shards nothing"
    dimensions: Any = "shard"
    if setup.ranks.layout.replicate > 1:
        dimensions = ("replicate", "shard")

    precision = MixedPrecisionPolicy()
    if config.precision in LOW_FORMATS:
        low = LOW_FORMATS[config.precision]
        precision = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)

    offload = OffloadPolicy()
    if config.fsdp_offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=setup.device.type == "cuda")
    return {"mesh": mesh[dimensions], "mp_policy": precision, "offload_policy": offload}


def _watch_reached(setup: Setup) -> None:
    """Have weights that only some ranks' losses reach count as zeros in the others: otherwise the
    sums of gradients would not fit each other. What no rank reaches keeps no gradient, so that no
    optimizer steps it."""
    model: Any = setup.model
    model.set_reduce_scatter_unused_params(True)
    slots = []
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
            if number in watched or parameter is None or isinstance(parameter, DTensor):
                continue
            watched.add(number)
            parameter.register_post_accumulate_grad_hook(
                lambda _, number=number: reached.add(number)
            )

    def counts() -> list[float]:
        """Which weights this rank's loss has reached since the last call, as numbers to add up."""
        found = [float(number in reached) for number in range(len(slots))]
        reached.clear()
        return found

    def drop_rest(anywhere: list[float]) -> None:
        """Drop the gradients of weights that no rank has reached."""
        for (module, name), is_reached in zip(slots, anywhere, strict=True):
            parameter = module._parameters[name]
            if not is_reached and parameter is not None:
                parameter.grad = None

    for module in model.modules():
        if isinstance(module, FSDPModule):
            setup.on_close(module.register_forward_pre_hook(watch).remove)
    setup.exchange.extra_reductions.append((counts, drop_rest))


def replicated(setup: Setup, reached: Set[nn.Parameter]) -> None:
    """Average gradients over ranks that each hold all weights, in the last micro-batch of a step
    only: they are whole anyway.

    Args:
        reached: the weights that a first forward reached; others wait until the backward is over.
    """
    # DistributedDataParallel by hooks: its usual wrapper would hide the model's attributes from
    # the user's loss.
    from torch.distributed._composable.replicate import replicate

    model: Any = setup.model
    trained = [parameter for _, parameter in setup.trainable()]
    reached_here = [float(parameter in reached) for parameter in trained]
    rest = []
    for parameter, is_reached in zip(trained, setup.ranks.largest(*reached_here), strict=True):
        if not is_reached:
            rest.append(parameter)

    setup.on_close(partial(_restore_modules, [_ModuleState(module) for module in model.modules()]))
    replicate(
        model,
        gradient_as_bucket_view=True,
        find_unused_parameters=may_skip(model),
        # Ranks hold the same weights already. Some may be on the host, where DDP would not look.
        init_sync=False,
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
    _average_statistics(setup)


def may_skip(model: nn.Module) -> bool:
    """Whether a loss may leave out weights that another one reaches, for which DDP must walk the
    graph in every step (0.3 ms of 28 in a Llama of 24 tiny layers): so do models whose code is not
    known, experts that are modules of their own, and layers that are dropped whole."""
    if not type(model).__module__.startswith("transformers.") or _drops_layers(model):
        return True

    for name, module in model.named_modules():
        if name.endswith("experts") and isinstance(module, nn.ModuleList | nn.ModuleDict):
            return True
    return False


def _drops_layers(model: Any) -> bool:
    """Whether a model leaves out layers at random, as its config may say."""
    if not type(model).__module__.startswith("transformers."):
        return False
    return any(value for name, value in model.config.to_dict().items() if "layerdrop" in name)


def _average_statistics(setup: Setup) -> None:
    """Have running statistics averaged after each backward, so that the model stays one: each
    rank's norms see only its own samples."""
    ranks = setup.ranks
    norms = [
        module
        for module in setup.model.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
    ]

    def average() -> None:
        """Add up all statistics at once."""
        buffers = []
        for norm in norms:
            buffers += [buffer for buffer in norm.buffers() if buffer.is_floating_point()]
        flat = ranks.sum_of(torch.cat([buffer.flatten() for buffer in buffers]))
        flat.div_(ranks.layout.world)

        start = 0
        for buffer in buffers:
            stop = start + buffer.numel()
            buffer.copy_(flat[start:stop].view_as(buffer))
            start = stop

    if norms:
        setup.exchange.after_backward.append(average)


def _average(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """Average the gradients of weights over all ranks, where any of those has one.

    Others count as zeros.
    """
    has_one = [float(parameter.grad is not None) for parameter in parameters]
    for parameter, any_has in zip(parameters, ranks.largest(*has_one), strict=True):
        if not any_has:
            continue

        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = ranks.sum_of(gradient).div_(ranks.layout.world)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all ranks, who call this together.

    Joined along one dimension of the mesh after the other: PyTorch warns of two at a time.
    """
    if not isinstance(tensor, DTensor):
        return tensor

    joined = tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        joined = joined.redistribute(placements=placements)

    local: torch.Tensor = joined.to_local()
    return local


def _large_ends(model: nn.Module) -> Iterator[nn.Module]:
    """Embedding and head, where each is called as a layer."""
    embedding: nn.Module | None = None
    get_embedding = getattr(model, "get_input_embeddings", None)
    if get_embedding:
        with suppress(NotImplementedError):  # a model of images or sound
            embedding = get_embedding()

    for end in (embedding, output_head(model)):
        if end is not None and hasattr(end, "weight"):
            yield end


def _reshard(models: Iterable[nn.Module]) -> None:
    """Give up gathered weights, which a forward without a backward leaves behind."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _ModuleState:
    """A module's class, attributes and hooks, as they were."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind = module.__class__
        self.attributes = set(vars(module))
        self.hooks = [set(hooks) for hooks in _hooks_of(module)]


def _restore_modules(given: list[_ModuleState]) -> None:
    """Take away the classes, hooks and attributes that modules got since."""
    for before in given:
        module = before.module
        module.__class__ = before.kind

        for hooks, known in zip(_hooks_of(module), before.hooks, strict=True):
            for key in hooks.keys() - known:
                del hooks[key]

        for name in vars(module).keys() - before.attributes:
            delattr(module, name)


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Any]]:
    """The dictionaries of a module's hooks around its forward."""
    yield module._forward_pre_hooks
    yield module._forward_hooks
    yield module._forward_pre_hooks_with_kwargs
    yield module._forward_hooks_with_kwargs


def _restore_weights(given: list[tuple[nn.Module, dict[str, nn.Parameter | None]]]) -> None:
    """Gather the weights again, in the parameters that the model came with."""
    done = set()
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
