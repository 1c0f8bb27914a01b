"""What tells one workload from another: structure and code of the model, shapes of the data, what is done with both.

Two that agree in all of it take the same memory and time. Values do not matter, neither of weights nor of data. A model
that a config.json describes is told by that; of any other also the code counts, with what it calls of the user's own,
for that may change while no shape does. Libraries are told by their versions.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autofit.core.files import digest
from autofit.core.workload import Workload
from autofit.data.batch import tensors

_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


def fingerprint(workload: Workload, model: nn.Module) -> str:
    """A digest of a workload as this process runs it, threads included; the same in every process like it.

    Raises whatever the user's own code does.
    """
    facts = [facts_of(workload, model), torch.get_num_threads()]
    return digest(json.dumps(facts, sort_keys=True, default=str))


def facts_of(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """Plain data. The model is what the workload's factory makes, with weights or without."""
    code = Code()
    return {
        "model": _described(workload) or list(_model_facts(model, code)),
        "batch": [[list(each.shape[1:]), str(each.dtype)] for each in tensors(workload.batch(1))],
        "workload": [workload.summary(), workload.unit, workload.reduction, workload.varying],
        "functions": [code.of(each) for each in (workload.loss, workload.count, workload.optimizer)],
    }


def _described(workload: Workload) -> list[Any] | None:
    """The task and the config of a model of transformers; None for one that brings its own code, and all others."""
    config = getattr(workload.model, "config", None)
    if not isinstance(config, Mapping) or getattr(workload.model, "trust_remote_code", False):
        return None
    return [workload.task, dict(config)]


def _model_facts(model: nn.Module, code: Code) -> Iterator[Any]:
    """Structure, settings, shapes, formats, what is trained, and the code of every class in it."""
    for name, module in model.named_modules():
        of_class = f"{type(module).__module__}.{type(module).__qualname__}"
        yield name, of_class, module.extra_repr(), _settings(module, code)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad
    for kind in sorted({type(module) for module in model.modules()}, key=lambda each: each.__qualname__):
        yield kind.__qualname__, code.of(kind), _version(kind)


def _settings(module: nn.Module, code: Code) -> Any:
    """The attributes by which two modules of one class and the same shapes compute differently."""
    return {name: code.used(value) for name, value in vars(module).items() if name[0] != "_" and name != "training"}


def _version(kind: type) -> Any:
    """Of the library that a class is from, where it says one."""
    return getattr(sys.modules.get(kind.__module__.partition(".")[0]), "__version__", None)


@dataclass
class Code:
    """What tells two versions of functions and classes apart, also of a notebook's cell, which has no file.

    What was told already is told by its name from then on: code may call itself.
    """

    _told: set[int] = field(default_factory=set)

    def of(self, thing: Any) -> Any:
        """The code of a function, class or partial function, and of what of the user's own that calls."""
        if thing is None:
            return None
        if id(thing) in self._told:
            return getattr(thing, "__qualname__", type(thing).__qualname__)
        self._told.add(id(thing))
        if inspect.isclass(thing):
            kinds = [each for each in thing.__mro__ if each not in (nn.Module, object)]
            return [thing.__qualname__, *(self._member(*each) for kind in kinds for each in vars(kind).items())]
        if isinstance(thing, functools.partial):
            return [self.of(thing.func), _plain(thing.args), _plain(thing.keywords)]
        if getattr(thing, "__code__", None) is None:
            return [type(thing).__qualname__, self.of(type(thing)), _plain(getattr(thing, "__dict__", {}))]
        closed_over = [self.used(cell.cell_contents) for cell in thing.__closure__ or ()]
        given = [_plain(thing.__defaults__), _plain(thing.__kwdefaults__), _plain(_state(thing))]
        return [thing.__qualname__, *_of_code(thing.__code__), closed_over, given, self._globals(thing)]

    def used(self, value: Any) -> Any:
        """A value that code has at hand: its code where it is a function or class of the user's own."""
        return self.of(value) if isinstance(value, _CODE) and not _is_library(value) else _plain(value)

    def _member(self, name: str, value: Any) -> Any:
        """A class's own function, however it is wrapped, or a plain setting."""
        if isinstance(value, property):
            return [name, *(self.of(each) for each in (value.fget, value.fset))]
        value = getattr(value, "__func__", value)  # of a static or class method
        if isinstance(value, types.FunctionType):
            return [name, self.of(value)]
        return [name, value] if isinstance(value, str | int | float) and not name.startswith("__") else None

    def _globals(self, function: Any) -> Any:
        """What a function of the user's own reads beside its arguments, also from other modules of his."""
        if _is_library(function):
            return None
        names, known = sorted(_names(function.__code__)), function.__globals__
        modules = [known[name] for name in names if isinstance(known.get(name), types.ModuleType)]
        own = [vars(module) for module in modules if not _is_library(module)]
        return [[name, self.used(each[name])] for each in (known, *own) for name in names if name in each]


def _state(function: Any) -> Any:
    """What a method is bound to holds."""
    return getattr(getattr(function, "__self__", None), "__dict__", None)


_CODE = (types.FunctionType, type)


def _is_library(thing: Any) -> bool:
    """Whether a version tells it, for it is installed: not what is in a notebook or script, or a module beside it."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None) or ""
    root = sys.modules.get(name.partition(".")[0])
    if root is None or root.__name__ == "__main__":  # whose file in a probe is autofit's own
        return False
    file = getattr(root, "__file__", None)
    return root.__name__ in sys.builtin_module_names if file is None else file.startswith(_LIBRARIES)


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _of_code(code: types.CodeType) -> list[Any]:
    constants = [_of_code(each) if isinstance(each, types.CodeType) else _plain(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _plain(value: Any) -> Any:
    """A value that a function closes over, without what differs between two processes."""
    if callable(to_dict := getattr(value, "to_dict", None)) and not inspect.isclass(value):
        return _plain(to_dict())  # the config of a transformers model
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return value if isinstance(value, str | int | float | bool | None) else type(value).__qualname__
