"""optimizer: which implementation turns gradients into updates, and in what precision it stores its state.

Bytes of state per trained weight, beside fp32 weights: `adamw` 8, `adamw-8bit` and `adamw-fp8` 2.03, `adamw-4bit` 1.06,
`adafactor` one number per row and column instead, `sgd` none. The low formats only store tensors of at least 4096
elements (torchao: of whole blocks, too); smaller ones have the state of `adamw`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer as TorchOptimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autofit.core.errors import reported, several, told
from autofit.distributed.kinds import by_kind
from autofit.setup import Config, Hardware, InputError, Setup, Stage, Technique, Value, Workload, requirements

_FIDELITY = {
    "adamw": 5,
    "adamw-foreach": 5,
    "adamw-8bit": 4,  # a code book made for the values of moments
    "adamw-4bit": 2,
    "adamw-fp8": 3,  # three bits of mantissa
    "paged-adamw-8bit": 4,
    "adafactor": 1,  # no first moment, and the second as a product of rows and columns
    "sgd": 0,
}
_COMPILED = ("adamw-4bit", "adamw-fp8")  # torchao compiles its step; step counts are on the host, in C++
_LIBRARY = dict.fromkeys(("adamw-8bit", "paged-adamw-8bit"), "bitsandbytes") | dict.fromkeys(_COMPILED, "torchao")
_ADA = (8, 9)  # first compute capability whose compiler supports float8_e4m3fn; torchao's README names it too
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer(Technique):
    """`adamw` (fused), `adamw-foreach`, AdamWs with small state, `adafactor` and `sgd` (no state).

    bitsandbytes makes `adamw-8bit` and `paged-adamw-8bit`, block-wise; the paged one stores tensors of 100,000 elements
    and more in managed memory, which moves to the host when the GPU is full. torchao makes `adamw-4bit` and
    `adamw-fp8`. null is the workload's own optimizer, where it has one.
    """

    name = "optimizer"
    stage = Stage.STEP
    off = "adamw"
    values = ("adamw", "adamw-foreach", "adamw-8bit", "adamw-4bit", "adamw-fp8", "paged-adamw-8bit", "adafactor", "sgd")
    nullable = True
    # torchao's first step compiles for 40 to 50 s on two CPU cores; bitsandbytes does not, for nearly the same bytes.
    cuda_values = (*_COMPILED, "paged-adamw-8bit")
    host_values = paged_values = ("paged-adamw-8bit",)
    compiled_values = _COMPILED
    always = True

    def canonicalize(self, config: Config, workload: Workload, hardware: Hardware) -> Value:
        """null where the workload brings an optimizer of its own."""
        return None if workload.optimizer else config[self.name] or self.off

    def choices(self, hardware: Hardware) -> tuple[Value, ...]:
        before_ada = requirements.too_old(hardware, _ADA)
        return tuple(value for value in super().choices(hardware) if value != "adamw-fp8" or not before_ada)

    def package(self, value: Value) -> str:
        return _LIBRARY.get(str(value), "torch")

    def exact(self, value: Value, workload: Workload) -> bool:
        return value in ("adamw", "adamw-foreach")

    def fidelity(self, value: Value) -> int:
        return _FIDELITY.get(str(value), 0)

    def refuse(self, config: Config, workload: Workload, hardware: Hardware) -> str | None:
        value, library = str(config[self.name]), _LIBRARY.get(str(config[self.name]))
        if library and (lacking := requirements.missing(library)):
            return f"{value} needs {lacking}, or use adamw."
        if value == "paged-adamw-8bit" and hardware.device == "cpu":
            return f"{value} moves state from GPU to host, and on a CPU both share one memory; use adamw-8bit."
        if value == "adamw-fp8" and (lacking := requirements.too_old(hardware, _ADA)):
            return f"{value} needs {lacking}; use adamw-8bit."
        if value in _COMPILED and hardware.here and (lacking := requirements.no_compiler(hardware.device, "cpu")):
            return f"{value} compiles its step: {lacking}, or use adamw-8bit."
        return None

    def memory_order(self, value: Value) -> int | None:
        """sgd has no state. 8-bit is not ordered: it stores small tensors' state in fp32, which is more than the bf16
        state of adamw beside bf16 weights. Nor is foreach: it adds temporaries, but keeps its step counters on the
        host, where fused adamw has one per tensor on the device. Adafactor's temporary is as large as the largest
        weight, and torchao's takes 24 bytes per element of it where a tracker forbids compilation."""
        return {"sgd": 0, "adamw": 1}.get(str(value))

    def apply(self, setup: Setup, value: Value) -> None:
        _make(setup, lambda: _kind(str(value)))

    def trace(self, setup: Setup, value: Value) -> None:
        """torchao compiles, and paged state is CUDA's: their stand-ins take the same memory."""
        _make(setup, lambda: _stand_in(str(value), setup) or _kind(str(value)))


def _make(setup: Setup, kind: Callable[[], Callable[..., TorchOptimizer]]) -> None:
    """Create the optimizer: the workload's own, or one of this kind. Raises InputError where the workload's function
    fails, or returns something else."""
    own, groups = setup.workload.optimizer, parameter_groups(setup)
    if not groups:
        raise InputError("the model has no trainable parameter.", "Set requires_grad on what should be trained.")
    setup.make_optimizer = own or functools.partial(kind(), lr=setup.hyperparameters.lr)
    failing = reported(lambda error: f"the optimizer function raised {told(error)}.", "Correct it.")
    with failing if own else nullcontext():
        setup.optimizer = setup.make_optimizer(groups)
    if isinstance(setup.optimizer, list | tuple | dict):
        raise several(f"the optimizer function returned a {type(setup.optimizer).__name__} of {len(setup.optimizer)}")
    if not isinstance(setup.optimizer, TorchOptimizer):
        given = type(setup.optimizer).__name__
        raise InputError(f"the optimizer function returned a {given}, not an Optimizer.", "Return the optimizer.")
    closure = inspect.signature(setup.optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        message = f"{type(setup.optimizer).__name__} computes the loss several times a step, which autofit does not do."
        raise InputError(message, "Choose an optimizer whose step needs no closure.")


def parameter_groups(setup: Setup) -> list[dict[str, Any]]:
    """Trainable parameters, each once, in groups: weight decay on matrices, none on biases and norms."""
    trained, decay = [parameter for _, parameter in setup.trainable()], setup.hyperparameters.weight_decay
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    return [
        {"params": kind, "weight_decay": each}
        for parameters, each in ((matrices, decay), (vectors, 0.0))
        for kind in by_kind(parameters)
    ]


def _kind(value: str) -> Callable[..., TorchOptimizer]:
    if value == "adamw":
        return functools.partial(torch.optim.AdamW, fused=True)
    if value == "adamw-foreach":
        return functools.partial(torch.optim.AdamW, foreach=True)
    if value == "sgd":
        return torch.optim.SGD
    if value == "adafactor":
        # A step of Adafactor is lr x max(eps[1], the weight's root mean square): with torch's eps[1] of 0.001 an lr
        # chosen for AdamW moves weights of 0.02 fifty times too slowly. With 1, lr means the same as in AdamW.
        # eps[0], squared, is the least variance: torch's is the format's (bf16: 6e-5, above most gradients'); this is
        # the least whose square bf16 and fp32 still tell from 0.
        return functools.partial(torch.optim.Adafactor, eps=(1e-15, 1.0))
    if value == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit

        return _own_manager(_over_shards(AdamW8bit))
    return _own_manager(_over_shards(_paged_adamw())) if value == "paged-adamw-8bit" else _low_bit_adamw(value)


def _own_manager(optimizer: type[TorchOptimizer]) -> Callable[..., TorchOptimizer]:
    """Keep bitsandbytes' process-wide overrides from an optimizer, except those of modules. Trainer has embeddings keep
    32-bit state; bitsandbytes remembers that by position in the parameter groups, and would apply it to every later
    optimizer of the process, which was not measured so."""

    def make(*arguments: Any, **options: Any) -> TorchOptimizer:
        made: Any = optimizer(*arguments, **options)
        modules = made.mng.module_weight_config_triple
        made.mng = object.__new__(type(made.mng))
        made.mng.initialize()
        made.mng.module_weight_config_triple = modules
        return made  # type: ignore[no-any-return]

    return make


class _OverShards(TorchOptimizer):
    """Adapts bitsandbytes' optimizers, whose kernels know no DTensors, to weights that ranks divide: each rank steps
    its part, as a plain tensor in the same storage. State is found by the model's parameters, and is of that part."""

    def step(self, closure: Any = None) -> Any:
        theirs: Any = self
        if not theirs.initialized:
            theirs.check_overrides()  # which it finds by parameter, and keeps by position
        with self._in_parts():
            return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._in_parts():
            super().load_state_dict(state_dict)
            for part, state in self.state.items():
                if (found := state["state1"].numel()) != part.numel():
                    message = f"the saved state of {found} elements is not of this rank's part of {part.numel()}"
                    raise InputError(f"{message}.", "Go on with as many devices as before, or with optimizer adamw.")

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        given = [group["params"] for group in self.param_groups]
        parts = {each: _part(each) for params in given for each in params if isinstance(each, DTensor)}
        self._rename(parts)
        for group, params in zip(self.param_groups, given, strict=True):
            group["params"] = [parts.get(each, each) for each in params]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, given, strict=True):
                group["params"] = params
            self._rename({part: each for each, part in parts.items()})

    def _rename(self, parameters: dict[Any, Any]) -> None:
        for old, new in parameters.items():
            if old in self.state:
                self.state[new] = self.state.pop(old)


def _part(parameter: DTensor) -> nn.Parameter:
    """This rank's part of a weight; without a gradient where it has no elements, which kernels do not expect."""
    part = nn.Parameter(parameter.detach().to_local())
    if parameter.grad is not None and part.numel():
        part.grad = parameter.grad.to_local()
    return part


def _over_shards(optimizer: type[TorchOptimizer]) -> type[TorchOptimizer]:
    return type(optimizer.__name__, (_OverShards, optimizer), {})


class _LowBit(TorchOptimizer):
    """Adapts torchao's optimizers: learning rates are numbers, as the loop expects, not tensors. torch.compile must
    take their step whole, and raises where an active dispatch mode (a tracker of storage) forbids compilation: then the
    same function runs uncompiled."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = rate

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float32)  # as a number, each would be a new graph
        modes: list[Any] = _get_current_dispatch_mode_stack()
        watched = any(not getattr(mode, "ignore_compile_internals", lambda: False)() for mode in modes)
        try:
            with torch.compiler.set_stance("force_eager") if watched else nullcontext():
                return super().step(closure)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate


@functools.cache
def _low_bit_adamw(value: str) -> type[TorchOptimizer]:
    from torchao.optim import AdamW4bit, AdamWFp8

    theirs = {"adamw-4bit": AdamW4bit, "adamw-fp8": AdamWFp8}[value]
    return type(theirs.__name__, (_LowBit, theirs), {})


class _Paged(TorchOptimizer):
    """Adapts bitsandbytes' paged optimizers, which load a checkpoint's state into plain device memory."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        theirs: Any = self
        super().load_state_dict(state_dict, move_to_device=False)  # type: ignore[call-arg]
        theirs.initialized = False  # the next step moves small state to the device
        for parameter, state in self.state.items():
            for key in ("state1", "state2"):
                pages = theirs.get_state_buffer(parameter, dtype=state[key].dtype)
                state[key] = pages.copy_(state[key])


@functools.cache
def _paged_adamw() -> type[TorchOptimizer]:
    from bitsandbytes.optim import PagedAdamW8bit

    return type(PagedAdamW8bit.__name__, (_Paged, PagedAdamW8bit), {})


def _stand_in(value: str, setup: Setup) -> Callable[..., TorchOptimizer] | None:
    """Takes the memory of an optimizer that cannot run on fake tensors, or not as it would on the target."""
    if value in _FORMATS:
        return functools.partial(_LowBitStandIn, low=_FORMATS[value])
    if value == "paged-adamw-8bit":
        return _own_manager(_paged_stand_in(setup))
    if value == "sgd" and setup.hardware.device == "cuda":
        return functools.partial(torch.optim.SGD, foreach=True)  # CUDA's default; a CPU's is a loop
    return None


@dataclass(frozen=True)
class _Format:
    """How torchao stores a moment, and the temporaries of its compiled step. Temporaries were read from the allocator
    during steps compiled by Inductor for a CPU (torch 2.13, torchao 0.18, 2^20 elements, fp32 and bf16 weights): new
    scales for both moments, and for `adamw-4bit` 26 bytes per element."""

    dtype: torch.dtype
    per_code: int
    block: int
    table: int
    temporary: int


_FORMATS = {
    "adamw-4bit": _Format(torch.uint8, per_code=2, block=128, table=16, temporary=26),
    "adamw-fp8": _Format(torch.float8_e4m3fn, per_code=1, block=256, table=0, temporary=0),
}
_SMALLEST_LOW_BIT = 4096  # elements: torchao, optim/adam.py, _new_buffer


class _LowBitStandIn(TorchOptimizer):
    """torchao's optimizers on fake tensors: their state, their temporaries, and the bytes they touch."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, low: _Format) -> None:
        super().__init__(groups, {"lr": lr})
        self._low = low

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, weight.grad)

    def _step(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        state, low = self.state[weight], self._low
        quantised = weight.numel() >= _SMALLEST_LOW_BIT and weight.numel() % low.block == 0
        for moment in _MOMENTS:
            if moment not in state:
                state[moment] = self._moment(weight) if quantised else [torch.zeros_like(weight)]
        temporaries = []
        if quantised:
            temporaries.append(weight.new_zeros(weight.numel() * low.temporary, dtype=torch.uint8))  # they are written
            temporaries += [torch.empty_like(state[moment][1]) for moment in _MOMENTS]
        weight.add_(gradient)
        for moment in _MOMENTS:
            state[moment][0].zero_()

    def _moment(self, weight: torch.Tensor) -> list[torch.Tensor]:
        low, count = self._low, weight.numel()
        scales, table = (weight.new_zeros(size, dtype=torch.float32) for size in (count // low.block, low.table))
        return [weight.new_zeros(count // low.per_code, dtype=low.dtype), scales, table]


_PAGED = 100_000  # elements: bitsandbytes, optim/optimizer.py, get_state_buffer


def _paged_stand_in(setup: Setup) -> type[TorchOptimizer]:
    """The plain 8-bit AdamW, whose larger state counts as the host's: CUDA's managed memory does not come from the
    device's allocator, and moves to the host when the device is full."""
    from bitsandbytes.optim import AdamW8bit

    class StandIn(AdamW8bit):  # type: ignore[misc]
        def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            buffer = torch.zeros_like(p, dtype=dtype)
            if p.numel() >= _PAGED:
                setup.note_host(buffer)
            return buffer

    return StandIn
