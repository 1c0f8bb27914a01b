"""Setup: a training run being assembled. The only mutable object, alive between build and loop."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.core.config import Config
from autofit.core.hardware import Hardware
from autofit.core.workload import Hyperparameters, Workload
from autofit.distributed import Ranks

Context = Callable[[], AbstractContextManager[Any]]
Holder = Callable[[torch.Tensor], nn.Parameter]
Slices = Callable[[int, int, int], Iterator[slice]]  # (tokens, features, vocabulary) -> the tokens of each chunk


@dataclass
class Setup:
    """Everything a training step needs, filled in stage by stage."""

    workload: Workload
    config: Config
    hardware: Hardware
    device: torch.device
    model: nn.Module
    hyperparameters: Hyperparameters
    random_weights: bool = False  # as in probes
    frozen_dtype: torch.dtype | None = None  # what `build` casts frozen weights to; None leaves them as they are
    trainable_dtype: torch.dtype | None = None  # the same of trained ones
    micro_batch_size: int = 1
    # Whether each module is trained in train mode; empty until all modules are there.
    modes: dict[nn.Module, bool] = field(default_factory=dict)
    # Per module and name, a function from the full weight on the device to the parameter that stores it (quantised).
    holders: dict[tuple[nn.Module, str], Holder] = field(default_factory=dict)
    # What is done as soon as all weights of a module are there, in the order of registration.
    when_made: dict[nn.Module, Callable[[], Any]] = field(default_factory=dict)
    # Has ranks that each hold all weights average gradients; told which weights the loss of a micro-batch reaches.
    replicate: Callable[[Set[nn.Parameter]], Any] | None = None
    # Called in this order when all but the compiler has changed the model.
    when_built: list[Callable[[], Any]] = field(default_factory=list)
    # Makes another optimizer of the same kind for other groups.
    make_optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None
    optimizer: Optimizer | None = None
    # Set where the backward applies gradients; whether it has since the last call.
    stepped_in_backward: Callable[[], bool] | None = None
    scaler: torch.amp.grad_scaler.GradScaler | None = None
    skipped_updates: int = 0  # by the scaler, since training began: the schedule waits for them
    gradient_norm: torch.Tensor | None = None  # of the last step, before clipping
    is_whole: bool = True  # whether weights and the optimizer's state are those between two steps
    phase: str = "forward"  # what the last step reached: forward, backward or update
    forward_contexts: list[Context] = field(default_factory=list)  # surround each micro-batch's forward
    # Surround its forward and backward, for what must also hold while blocks are recomputed.
    step_contexts: list[Context] = field(default_factory=list)
    # For stand-ins under fake tensors, which are all on one device: marks a tensor as the host's.
    note_host: Callable[[torch.Tensor], Any] = lambda tensor: None
    ranks: Ranks = field(default_factory=Ranks)
    # Told before each micro-batch whether it is the last of a step, after which gradients are averaged over ranks.
    sync_gradients: Callable[[bool], Any] = lambda last: None
    # Called after the last backward of a step: average over ranks what is not averaged by then.
    after_backward: list[Callable[[], Any]] = field(default_factory=list)
    # Numbers that are added up over ranks together with a step's loss, and what gets the sums.
    added_up: list[tuple[Callable[[], list[float]], Callable[[list[float]], Any]]] = field(default_factory=list)
    counted: float = 0.0  # the terms in the loss of the last step, over all ranks
    # Gives up weights of other ranks that a forward without a backward gathered.
    reshard: Callable[[], Any] = lambda: None
    # What a trained weight holds, which may rest elsewhere; what is written to it counts from then on.
    value_of: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach
    # Trained weights that rest on the host with their gradients, and what is to be updated there, each with its `grad`.
    at_rest: Callable[[], dict[nn.Parameter, torch.Tensor]] = dict
    of_parts: bool = False  # a trace whose blocks stand for those of a deeper model
    slices: Slices | None = None  # replaces the chunks of a loss where a trace does not want them all
    warnings: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)  # sentences about what a trace took for granted
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that are trained; tied weights appear once."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def trained_values(self) -> list[tuple[str, torch.Tensor]]:
        """Names and values of what is trained, wherever they rest."""
        return [(name, self.value_of(p)) for name, p in self.trainable()]

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance or a module until `close`."""
        before = vars(owner)
        self.on_close(partial(setattr, owner, name, before[name]) if name in before else partial(delattr, owner, name))
        setattr(owner, name, value)

    def on_close(self, undo: Callable[[], Any]) -> None:
        """Register a function that reverts a change to the user's model; `close` runs them in reverse order."""
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
