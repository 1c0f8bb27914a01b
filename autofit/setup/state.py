"""Setup: a training run being assembled. The only mutable object, alive between build and loop.

Techniques write into it what they decided, and put in what is to run in each step;
`autofit.training.strategy` runs it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import TRAINED, Hyperparameters, Workload
from autofit.distributed import Ranks
from autofit.setup.model_part import ModelPart

Context = Callable[[], AbstractContextManager[Any]]
Holder = Callable[[torch.Tensor], nn.Parameter]
# (tokens, features, vocabulary) -> the tokens of each chunk
Slices = Callable[[int, int, int], Iterator[slice]]
# Numbers that are added up over ranks together with the loss of a step, and what gets the sums.
ExtraReduction = tuple[Callable[[], list[float]], Callable[[list[float]], Any]]


@dataclass
class WeightPlan:
    """How weights are stored and made, decided before there are any."""

    are_random: bool = False  # as in probes, which need no trained ones
    trainable_dtype: torch.dtype | None = None  # None leaves trained weights as they are
    frozen_dtype: torch.dtype | None = None  # the same of frozen ones
    # Per module and name, a function from the full weight on the device to the parameter that
    # stores it (quantised).
    holders: dict[tuple[nn.Module, str], Holder] = field(default_factory=dict)
    # Called as soon as all weights of a module are there, in the order of registration.
    on_materialized: list[tuple[nn.Module, Callable[[], Any]]] = field(default_factory=list)

    def dtype_of(self, weight: torch.Tensor) -> torch.dtype:
        """What a trained or frozen weight is stored in."""
        if not weight.is_floating_point():
            return weight.dtype
        wanted = self.trainable_dtype if weight.requires_grad else self.frozen_dtype
        return wanted or weight.dtype


@dataclass
class Exchange:
    """What several ranks exchange in a step, beside the loss. On one device nothing of it is
    called."""

    # Has ranks that each hold all weights average gradients; gets the weights that the loss of a
    # micro-batch reaches.
    replicate: Callable[[Set[nn.Parameter]], Any] | None = None
    # Gets before each micro-batch whether it is the last of a step, after which gradients are
    # averaged over ranks.
    sync_gradients: Callable[[bool], Any] = lambda is_last: None
    # Called after the last backward of a step: average over ranks what is not averaged by then.
    after_backward: list[Callable[[], Any]] = field(default_factory=list)
    extra_reductions: list[ExtraReduction] = field(default_factory=list)
    # Gives up weights of other ranks that a forward without a backward gathered.
    reshard: Callable[[], Any] = lambda: None


@dataclass
class Progress:
    """How far training is, and what its last step came to."""

    phase: str = "forward"  # what the last step reached: forward, backward or update
    terms: float = 0.0  # in the loss of the last step, over all ranks
    # What a loss asks of the whole effective batch before its micro-batches, in a step.
    over_batch: torch.Tensor | None = None
    gradient_norm: torch.Tensor | None = None  # of the last step, before clipping
    # By the loss scaler, since training began: the schedule waits for them.
    skipped_updates: int = 0
    is_whole: bool = True  # whether weights and the optimizer's state are those between two steps


@dataclass
class Tracing:
    """What a trace on fake tensors asks of techniques, and what it takes for granted."""

    is_sampled: bool = False  # whether its blocks stand for those of a deeper model
    # The samples of the batch of which one micro-batch is traced, where its loss needs all at once.
    whole_batch: int | None = None
    # Where the model has the blocks of one stage of a pipeline alone, and one in place of each row
    # of others: its cuts, before most of the stage's blocks were left out as well.
    cuts: Sequence[int] = ()
    slices: Slices | None = None  # replaces the chunks of a loss, where not all are wanted
    # Marks a tensor as the host's, since fake tensors are all on one device.
    note_host: Callable[[torch.Tensor], Any] = lambda tensor: None
    assumptions: list[str] = field(default_factory=list)  # in sentences


@dataclass
class Setup:
    """Everything a training step needs, filled in stage by stage."""

    # What was decided.
    workload: Workload
    config: Config
    hardware: Hardware
    device: torch.device
    model: nn.Module
    hyperparameters: Hyperparameters
    # Models that the loss asks beside the trained one, by name.
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    # Further names under which the loss finds a model: the function of one there is already.
    stand_ins: dict[str, Callable[..., Any]] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    part: ModelPart | None = None  # what this rank holds, where a model is cut into stages
    micro_batch_size: int = 1
    weights: WeightPlan = field(default_factory=WeightPlan)
    tracing: Tracing = field(default_factory=Tracing)
    # Whether each module is trained in train mode; empty until all modules are there.
    modes: dict[nn.Module, bool] = field(default_factory=dict)
    # Called in this order when all but the compiler has changed the model.
    when_built: list[Callable[[], Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    # What runs in a step.
    # Surround the forward of each micro-batch.
    forward_contexts: list[Context] = field(default_factory=list)
    # Surround all forwards and backwards of a step, for what must also hold while blocks are
    # recomputed.
    step_contexts: list[Context] = field(default_factory=list)
    exchange: Exchange = field(default_factory=Exchange)
    scaler: torch.amp.grad_scaler.GradScaler | None = None
    optimizer: Optimizer = field(init=False, repr=False)  # there from Stage.STEP on
    # Makes another optimizer of the same kind for other groups.
    make_optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None
    # Set where the backward applies gradients; whether it has since the last call.
    stepped_in_backward: Callable[[], bool] | None = None
    # The current value of a trained weight, which may be on the host; writes to it are persistent.
    value_of: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach
    # The trained weights that are updated on the host, each with the tensor there that holds it and
    # its gradient.
    host_params: Callable[[], dict[nn.Parameter, torch.Tensor]] = dict
    progress: Progress = field(default_factory=Progress)

    _undo: list[Callable[[], None]] = field(default_factory=list)

    def all_models(self) -> list[nn.Module]:
        """The trained model, and those that are not trained beside it."""
        return [self.model, *self.frozen.values()]

    def models(self) -> Any:
        """What the loss gets: the model, or a mapping of names where it asks others, too."""
        if not self.workload.frozen:
            return self.model
        return {TRAINED: self.model, **self.frozen, **self.stand_ins}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that are trained; tied weights appear once.

        Of a stage of a pipeline, names are those of the whole model.
        """
        named = self.model.named_parameters()
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if self.part is None:
            return trained
        tied = self.part.tied
        return [(tied.get(parameter, name), parameter) for name, parameter in trained]

    def trained_values(self) -> list[tuple[str, torch.Tensor]]:
        """Names and values of what is trained, wherever they are."""
        return [(name, self.value_of(parameter)) for name, parameter in self.trainable()]

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance or a module until `close`."""
        attributes = vars(owner)
        if name in attributes:
            self.on_close(partial(setattr, owner, name, attributes[name]))
        else:
            self.on_close(partial(delattr, owner, name))

        setattr(owner, name, value)

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Register a function that reverts a change to the user's model.

        `close` runs them in reverse order.
        """
        self._undo.append(undo)

    def close(self) -> None:
        """Return the model without hooks and wrappers; weights and their dtype stay."""
        while self._undo:
            self._undo.pop()()

    def forward_context(self) -> ExitStack:
        """All forward contexts entered, to be used in a `with`."""
        return _entered(self.forward_contexts)

    def step_context(self) -> ExitStack:
        """All step contexts entered, to be used in a `with`."""
        return _entered(self.step_contexts)


def _entered(contexts: list[Context]) -> ExitStack:
    """Enter contexts one after the other, and hand over what closes them."""
    with ExitStack() as stack:  # closes the open ones when the next one fails to open
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout and with stored statistics inside; every module gets its own mode back."""
    modes = modes_of(model)
    model.eval()

    try:
        yield
    finally:
        set_modes(modes)


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Whether each module is in train mode."""
    return {module: module.training for module in model.modules()}


def set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Put each module into its mode, and no other: `Module.train` would reach all below it."""
    for module, mode in modes.items():
        module.training = mode
