"""What the state of an optimizer looks like.

It tells a saved state that is not of this model before that is used: compiled steps read and write
as many elements as a weight has, however few its state has.

The optimizer itself says so: a copy of it steps one stand-in for each kind of weight, and what it
holds afterwards is the form of all state of that kind. No library's layout is written down here.
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

# settings of a group that change no form
_OF_A_RUN = ("params", "lr", "lr_ratio", "weight_decay", "initial_lr")

Entry = dict[str, Any]  # the state of one weight, or the forms of it
Group = dict[str, Any]  # of parameters, as an optimizer holds it


class StateError(Exception):
    """A saved state that is not of this optimizer and these weights."""


@dataclass(frozen=True)
class Form:
    """How a tensor of the state lies in memory; `inner`: the tensors that its class wraps."""

    kind: type
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    inner: Mapping[str, "Form"]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Form":
        """The form of a tensor."""
        kind: type = torch.Tensor
        inner: dict[str, Form] = {}
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                value = getattr(tensor, name)
                if isinstance(value, torch.Tensor):
                    kind = type(tensor)
                    inner[name] = cls.of(value)

        return cls(
            kind,
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
            inner,
        )

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

        restrided = torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=saved.device,
        )

        return restrided.copy_(saved)


class OptimizerSchema:
    """The forms of an optimizer's state.

    `is_own`: the optimizer is of the user's code. Its state may gain entries later on, and its
    groups may hold state.
    """

    def __init__(self, optimizer: Optimizer, *, is_own: bool) -> None:
        self._optimizer = optimizer
        self._is_own = is_own
        self._known: dict[Hashable, Entry] = {}

        for part, group in self._groups():  # at once: ranks may have to step together
            for weight in group["params"]:
                self._forms(part, group, weight)

    def _groups(self) -> Iterator[tuple[Optimizer, Group]]:
        """The groups of all optimizers that this one consists of."""
        for optimizer in _flat(_parts_of(self._optimizer)):
            for group in optimizer.param_groups:
                yield optimizer, group

    @torch.no_grad()
    def fitted(self, saved: Any) -> Any:
        """The state to load. Raises StateError for one that is not of this optimizer."""
        return self._fitted_parts(
            _parts_of(self._optimizer),
            saved,
            "the state",
        )

    def check_entry(
        self,
        weight: nn.Parameter,
        given: Entry,
        name: str,
        *,
        on_meta: bool = False,
    ) -> None:
        """Raise a StateError unless entries are those of a weight.

        `on_meta`: only their shapes are known.
        """
        for optimizer, group in self._groups():
            if any(parameter is weight for parameter in group["params"]):
                forms = self._forms(optimizer, group, weight)
                self._fitted_entry(forms, given, name, on_meta=on_meta)

    def _fitted_parts(self, parts: Any, saved: Any, name: str) -> Any:
        """The state to load of optimizers in containers."""
        if isinstance(parts, Optimizer):
            return self._fitted_optimizer(parts, saved, name)
        if type(saved) is not type(parts):
            raise StateError(f"{name} is {shown(saved)}")

        if isinstance(parts, dict):
            if saved.keys() != parts.keys():
                raise StateError(f"{name} holds {shown(sorted(map(str, saved)))}")

            fitted = {}
            for key, part in parts.items():
                fitted[key] = self._fitted_parts(
                    part,
                    saved[key],
                    f"{key} of {name}",
                )

            return fitted

        if isinstance(parts, list):
            numbered = dict(enumerate(parts))
            fitted = self._fitted_parts(
                numbered,
                dict(enumerate(saved)),
                name,
            )
            return list(fitted.values())

        return saved

    def _fitted_optimizer(self, optimizer: Optimizer, saved: Any, name: str) -> Any:
        """The state of one optimizer of PyTorch's own form.

        A user's class may have another one, which it checks by itself.
        """
        own = optimizer.state_dict()
        if not isinstance(saved, type(own)):
            raise StateError(f"{name} is {shown(saved)}")
        if not isinstance(own, dict) or not {"state", "param_groups"} <= own.keys():
            return saved
        if not own.keys() <= saved.keys():
            raise StateError(f"{name} is {shown(saved)}")

        groups = self._fitted_groups(own["param_groups"], saved["param_groups"], name)
        held = saved["state"]
        if not isinstance(held, dict):
            raise StateError(f"{name} is {shown(held)}")

        forms = {}
        for group, numbered in zip(optimizer.param_groups, own["param_groups"], strict=True):
            for weight, number in zip(group["params"], numbered["params"], strict=True):
                if number in held:
                    forms[number] = self._forms(optimizer, group, weight)

        state = {}
        for number, entry in held.items():
            if number in forms:
                state[number] = self._fitted_entry(
                    forms[number],
                    entry,
                    f"weight {number}",
                )
            elif self._is_own:
                state[number] = entry
            else:
                raise StateError(f"{name} has a weight {shown(number)}")

        return {**saved, "state": state, "param_groups": groups}

    def _fitted_groups(self, own: list[Group], saved: Any, name: str) -> list[Group]:
        """The settings of the groups.

        They are this run's own, but for a user's class, which may hold state there.
        """
        if not isinstance(saved, list) or len(saved) != len(own):
            raise StateError(f"{name} is of other groups of weights")

        groups = []
        for group, given in zip(own, saved, strict=True):
            if not isinstance(given, dict) or given.get("params") != group["params"]:
                raise StateError(f"{name} is of other groups of weights")

            settings = group
            if self._is_own:
                for key in group.keys() & given.keys():
                    _check_kind(
                        given[key],
                        group[key],
                        f"{key} of a group",
                    )

                settings = {**group, **given}

            groups.append(settings)

        return groups

    def _fitted_entry(
        self,
        forms: Entry,
        entry: Any,
        name: str,
        *,
        on_meta: bool = False,
    ) -> Entry:
        """The state of a weight to load; what is on meta is only checked."""
        if not isinstance(entry, dict):
            raise StateError(f"the state of {name} is {shown(entry)}")

        for key in forms:
            if entry and key not in entry:
                raise StateError(f"the state of {name} lacks {key}")

        for key in entry:
            if key not in forms and not self._is_own:
                raise StateError(f"the state of {name} holds {shown(key)}")

        fitted = dict(entry)
        for key in entry.keys() & forms.keys():
            form = forms[key]
            given = entry[key]
            what = f"{key} of {name}"

            # bitsandbytes nests what it quantises
            if isinstance(form, dict) and isinstance(given, dict):
                fitted[key] = self._fitted_entry(
                    form,
                    given,
                    what,
                    on_meta=on_meta,
                )
            elif not isinstance(form, Form):
                _check_kind(given, form, what)
            elif on_meta:
                form.checked(given, what)
            else:
                fitted[key] = form.fitted(given, what)

        return fitted

    def _forms(self, optimizer: Optimizer, group: Group, weight: nn.Parameter) -> Entry:
        """The forms of the entries of a weight."""
        key = (
            type(optimizer),
            repr(_without(group, *_OF_A_RUN)),
            weight.shape,
            weight.stride(),
            weight.dtype,
            str(weight.device),
            str(getattr(weight, "placements", None)),
        )

        if key not in self._known:
            self._known[key] = self._measured(optimizer, group, weight)

        return self._known[key]

    def _measured(self, optimizer: Optimizer, group: Group, weight: nn.Parameter) -> Entry:
        """What a copy of the optimizer holds of a stand-in for a weight after a step."""
        stand_in = nn.Parameter(torch.zeros_like(weight))  # the weight itself may rest elsewhere
        stand_in.grad = torch.zeros_like(stand_in)

        settings = copy.deepcopy(_without(group, "params"))
        trial: Any = object.__new__(type(optimizer))
        vars(trial).update(vars(optimizer))
        trial.state = defaultdict(dict)
        trial.param_groups = [{**settings, "params": [stand_in]}]
        # of bitsandbytes: pages of CUDA's managed memory are never given back
        trial.is_paged = False

        try:
            # to compile a step takes 40 s
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                type(optimizer).step(trial)

            held = trial.state_dict()["state"].get(0, {})
        except Exception:
            if not self._is_own:
                raise

            # A user's class that steps its own weights alone: PyTorch's operators check what it
            # does.
            held = {}

        forms = {}
        if isinstance(held, dict):
            forms = _form_of(held)
        if self._is_own:  # what is not of the weight's shape may change as training goes on
            for key, form in list(forms.items()):
                if not isinstance(form, Form) or form.shape != weight.shape:
                    del forms[key]

        return forms


def _without(group: Group, *keys: str) -> Group:
    """The other settings of a group."""
    return {key: value for key, value in group.items() if key not in keys}


def _form_of(value: Any) -> Any:
    """The forms of the tensors in nested dicts; other values as they are."""
    if isinstance(value, torch.Tensor):
        return Form.of(value)
    if isinstance(value, dict):
        return {key: _form_of(item) for key, item in value.items()}

    return value


def _parts_of(optimizer: Optimizer) -> Any:
    """The optimizers that one consists of, in the containers that its `state_dict` has."""
    parts = getattr(optimizer, "parts", None)
    if callable(parts):
        return parts()

    return optimizer


def _flat(parts: Any) -> Iterator[Optimizer]:
    """The optimizers in nested containers."""
    if isinstance(parts, dict):
        parts = list(parts.values())
    if isinstance(parts, Optimizer):
        yield parts
    elif isinstance(parts, list):
        for part in parts:
            yield from _flat(part)


def _check_kind(given: Any, like: Any, name: str) -> None:
    """Raise a StateError for a plain value of another kind, or a number that is none."""
    if like is None:
        return

    is_fine = isinstance(given, type(like))
    if _is_number(like):
        is_fine = _is_number(given) and math.isfinite(given)
    elif is_fine and isinstance(like, tuple | list):
        is_fine = len(given) == len(like)
        for item, own in zip(given, like, strict=False):
            _check_kind(item, own, name)
    elif is_fine and isinstance(like, torch.Tensor):
        is_fine = given.shape == like.shape

    if not is_fine:
        raise StateError(f"{name} is {shown(given)}, and not as {shown(like)}")


def _is_number(value: Any) -> bool:
    """Whether a value is a number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _words(shape: torch.Size, dtype: torch.dtype) -> str:
    """A shape and a dtype, as a message names them."""
    return f"{list(shape)} of {str(dtype).removeprefix('torch.')}"
