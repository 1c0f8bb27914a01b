"""What the state of an optimizer looks like, to tell a saved one that is not of this model before it is used: compiled
steps read and write as many elements as a weight has, however few its state has.

The optimizer itself says so: a copy of it steps one stand-in for each kind of weight, and what it holds afterwards is
the form of all state of that kind. No library's layout is written down here.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autofit.core.errors import shown

# of a group: what changes no form
_OF_A_RUN = ("params", "lr", "lr_ratio", "weight_decay", "initial_lr")


class StateError(Exception):
    """A saved state that is not of this optimizer and these weights."""


@dataclass(frozen=True)
class Form:
    """How a tensor of the state lies in memory; `inner`: the tensors that it wraps, where its class wraps any."""

    kind: type
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    inner: Mapping[str, "Form"]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form of a tensor."""
        inner: dict[str, Form] = {}
        if is_traceable_wrapper_subclass(tensor):
            wrapped = ((name, getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
            inner = {
                name: cls.of(value) for name, value in wrapped if isinstance(value, torch.Tensor)
            }
        kind = type(tensor) if inner else torch.Tensor
        return cls(kind, tensor.shape, tensor.dtype, tensor.stride(), inner)

    def checked(self, given: Any, name: str) -> torch.Tensor:
        """The saved tensor; raises StateError for what is none, or of another shape or format."""
        if not isinstance(given, torch.Tensor):
            raise StateError(f"{name} is {shown(given)}, and no tensor")
        if given.shape != self.shape or given.dtype != self.dtype:
            needed = _words(self.shape, self.dtype)
            found = _words(given.shape, given.dtype)
            raise StateError(f"{name} is {found}, and not {needed}")
        return given

    def fitted(self, given: Any, name: str) -> torch.Tensor:
        """A saved tensor as it is to lie in memory. Raises StateError as `checked`."""
        saved = self.checked(given, name)
        if saved.layout is not torch.strided:
            raise StateError(f"{name} is sparse")
        if type(saved) is self.kind and self.inner:
            for own, form in self.inner.items():
                held = getattr(saved, own)
                if form.fitted(held, f"{own} of {name}") is not held:
                    raise StateError(f"{own} of {name} has other strides")
            return saved
        if type(saved) not in (torch.Tensor, nn.Parameter):
            raise StateError(f"{name} is a {type(saved).__name__}")
        if self.inner:  # ranks divide what one device wrote whole
            return saved.contiguous()
        if saved.stride() == self.stride:
            return saved
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=saved.device
        ).copy_(saved)


class OptimizerSchema:
    """The forms of an optimizer's state. `is_own`: it is of the user's code, whose state may gain entries later on, and
    whose groups may hold state."""

    def __init__(self, optimizer: Optimizer, *, is_own: bool) -> None:
        self._optimizer = optimizer
        self._is_own = is_own
        self._known: dict[Hashable, dict[str, Any]] = {}
        for each in _flat(_parts_of(optimizer)):  # at once: ranks may have to step together
            for group in each.param_groups:
                for weight in group["params"]:
                    self._forms(each, group, weight)

    @torch.no_grad()
    def fitted(self, saved: Any) -> Any:
        """The state to load. Raises StateError for one that is not of this optimizer."""
        return self._fitted_parts(_parts_of(self._optimizer), saved, "the state")

    def check_entry(
        self, weight: nn.Parameter, given: Mapping[str, Any], name: str, *, on_meta: bool = False
    ) -> None:
        """Raise a StateError unless entries are those of a weight; `on_meta`: where only their shapes are known."""
        for optimizer in _flat(_parts_of(self._optimizer)):
            for group in optimizer.param_groups:
                if any(each is weight for each in group["params"]):
                    self._fitted_entry(
                        self._forms(optimizer, group, weight), given, name, on_meta=on_meta
                    )

    def _fitted_parts(self, parts: Any, saved: Any, name: str) -> Any:
        """The same for optimizers in containers."""
        if isinstance(parts, Optimizer):
            return self._fitted_optimizer(parts, saved, name)
        if type(saved) is not type(parts) or (parts is not None and len(saved) != len(parts)):
            raise StateError(f"{name} is {shown(saved)}")
        if isinstance(parts, dict):
            if saved.keys() != parts.keys():
                raise StateError(f"{name} holds {shown(sorted(map(str, saved)))}")
            return {
                key: self._fitted_parts(part, saved[key], f"{key} of {name}")
                for key, part in parts.items()
            }
        if isinstance(parts, list):
            pairs = zip(parts, saved, strict=True)
            return [
                self._fitted_parts(part, given, f"{n} of {name}")
                for n, (part, given) in enumerate(pairs)
            ]
        return saved

    def _fitted_optimizer(self, optimizer: Optimizer, saved: Any, name: str) -> Any:
        """The state of one optimizer of PyTorch's own form; a user's class may have another one, which it checks."""
        own = optimizer.state_dict()
        has_form = isinstance(own, dict) and {"state", "param_groups"} <= own.keys()
        if not isinstance(saved, type(own)) or (has_form and not own.keys() <= saved.keys()):
            raise StateError(f"{name} is {shown(saved)}")
        if not has_form:
            return saved

        groups = self._fitted_groups(own["param_groups"], saved["param_groups"], name)
        held = saved["state"]
        if not isinstance(held, dict):
            raise StateError(f"{name} is {shown(held)}")
        weights = {
            number: (group, weight)
            for group, numbered in zip(optimizer.param_groups, own["param_groups"], strict=True)
            for weight, number in zip(group["params"], numbered["params"], strict=True)
        }
        state: dict[Any, Any] = {}
        for number, entry in held.items():
            if number in weights:
                group, weight = weights[number]
                forms = self._forms(optimizer, group, weight)
                state[number] = self._fitted_entry(forms, entry, f"weight {number}")
            elif self._is_own:
                state[number] = entry
            else:
                raise StateError(f"{name} has a weight {shown(number)}")
        return {**saved, "state": state, "param_groups": groups}

    def _fitted_groups(
        self, own: list[dict[str, Any]], saved: Any, name: str
    ) -> list[dict[str, Any]]:
        """The settings of the groups: this run's own, but for a user's class, which may hold state there."""
        are_groups = isinstance(saved, list) and all(isinstance(group, dict) for group in saved)
        if not are_groups or [group.get("params") for group in saved] != [
            group["params"] for group in own
        ]:
            raise StateError(f"{name} is of other groups of weights")
        if not self._is_own:
            return own
        for group, given in zip(own, saved, strict=True):
            for key in group.keys() & given.keys():
                _check_kind(given[key], group[key], f"{key} of a group")
        return [{**group, **given} for group, given in zip(own, saved, strict=True)]

    def _fitted_entry(
        self, forms: Mapping[str, Any], entry: Any, name: str, *, on_meta: bool = False
    ) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise StateError(f"the state of {name} is {shown(entry)}")
        lacking = [key for key in forms if key not in entry]
        others = [] if self._is_own else [key for key in entry if key not in forms]
        if entry and (lacking or others):
            wrong = f"lacks {lacking[0]}" if lacking else f"holds {shown(others[0])}"
            raise StateError(f"the state of {name} {wrong}")

        fitted = dict(entry)
        for key in entry.keys() & forms.keys():
            form = forms[key]
            what = f"{key} of {name}"
            # bitsandbytes nests what it quantises
            if isinstance(form, dict) and isinstance(entry[key], dict):
                fitted[key] = self._fitted_entry(form, entry[key], what, on_meta=on_meta)
            elif not isinstance(form, Form):
                _check_kind(entry[key], form, what)
            elif on_meta:
                form.checked(entry[key], what)
            else:
                fitted[key] = form.fitted(entry[key], what)
        return fitted

    def _forms(
        self, optimizer: Optimizer, group: Mapping[str, Any], weight: nn.Parameter
    ) -> dict[str, Any]:
        """The forms of the entries of a weight."""
        settings = {key: value for key, value in group.items() if key not in _OF_A_RUN}
        place = str(weight.device), str(getattr(weight, "placements", None))
        key = (type(optimizer), repr(settings), weight.shape, weight.stride(), weight.dtype, place)
        if key not in self._known:
            self._known[key] = self._measured(optimizer, group, weight)
        return self._known[key]

    def _measured(
        self, optimizer: Optimizer, group: Mapping[str, Any], weight: nn.Parameter
    ) -> dict[str, Any]:
        """What a copy of the optimizer holds of a stand-in for a weight after a step."""
        stand_in = nn.Parameter(torch.zeros_like(weight))  # the weight itself may rest elsewhere
        stand_in.grad = torch.zeros_like(stand_in)
        settings = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        trial: Any = object.__new__(type(optimizer))
        vars(trial).update(vars(optimizer))
        trial.state = defaultdict(dict)
        trial.param_groups = [{**settings, "params": [stand_in]}]
        trial.is_paged = (
            False  # of bitsandbytes: pages of CUDA's managed memory are never given back
        )
        try:
            # to compile a step takes 40 s
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                type(optimizer).step(trial)
            held = trial.state_dict()["state"].get(0, {})
        except Exception:
            if not self._is_own:
                raise
            held = {}  # a user's class that steps its own weights alone: PyTorch's operators check what it does
        forms = (
            {key: _form_of(value) for key, value in held.items()} if isinstance(held, dict) else {}
        )
        if self._is_own:  # what is not of the weight's shape may change it as training goes on
            return {
                key: form
                for key, form in forms.items()
                if isinstance(form, Form) and form.shape == weight.shape
            }
        return forms


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Form.of(value)
    return (
        {key: _form_of(each) for key, each in value.items()} if isinstance(value, dict) else value
    )


def _parts_of(optimizer: Optimizer) -> Any:
    """The optimizers that one consists of, in the containers that its `state_dict` has their states in."""
    parts = getattr(optimizer, "parts", None)
    return parts() if callable(parts) else optimizer


def _flat(parts: Any) -> Iterator[Optimizer]:
    if isinstance(parts, Optimizer):
        yield parts
    elif isinstance(parts, dict | list):
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _flat(part)


def _check_kind(given: Any, like: Any, name: str) -> None:
    """Raise a StateError for a plain value of another kind, or a number that is none."""
    if like is None:
        return
    is_number = [
        isinstance(each, int | float) and not isinstance(each, bool) for each in (given, like)
    ]
    is_fine = (
        is_number[0] and math.isfinite(given) if is_number[1] else isinstance(given, type(like))
    )
    if isinstance(like, tuple | list) and is_fine:
        is_fine = len(given) == len(like)
        for each, own in zip(given, like, strict=False):
            _check_kind(each, own, name)
    if isinstance(like, torch.Tensor) and is_fine:
        is_fine = given.shape == like.shape
    if not is_fine:
        raise StateError(f"{name} is {shown(given)}, and not as {shown(like)}")


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
