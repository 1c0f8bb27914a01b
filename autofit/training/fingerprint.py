"""Fingerprints of workloads: the model's structure and code, the shapes of the data, and what is done with both.

Workloads with equal fingerprints take the same memory and time; values of weights and data do not matter. A model made
from a config.json is identified by that. Of any other the user's code counts too, since it may change while no shape
does. Libraries are identified by their versions.
"""

import functools
import hashlib
import inspect
import json
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autofit import techniques
from autofit.core.files import digest
from autofit.core.workload import Workload
from autofit.data.batch import tensors
from autofit.training.model_state import stays_in_eval

LAYOUT = 2  # of cached results, measurements and predictions: a new number leaves all older entries unread
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


def fingerprint(workload: Workload, model: nn.Module) -> str:
    """A digest of a workload and the number of threads; the same in every process like this one. Raises whatever the
    user's own code does."""
    return digest(
        json.dumps(
            [facts_of(workload, model), torch.get_num_threads()], sort_keys=True, default=str
        )
    )


def cache_key(workload: object, **conditions: Any) -> str:
    """Names what is cached about a workload (its fingerprint, or the facts that stand for it); another name for any
    change that could matter. The code of added techniques always counts beside the `conditions`."""
    added = list(map(Code().of, map(type, techniques.added_techniques())))
    return f"v{LAYOUT}-" + digest(
        json.dumps([workload, added, conditions], sort_keys=True, default=str)
    )


@functools.cache
def own_code(*rooms: str) -> str:
    """A digest of autofit's source code in these rooms, by default in all: a checkout changes without its version."""
    found = hashlib.sha256()
    for folder in [_PACKAGE / room for room in rooms] or [_PACKAGE]:
        files = sorted(folder.rglob("*.py"))
        assert files, f"there is no code in {folder}"  # whose changes would go unnoticed
        for file in files:
            found.update(f"{file.relative_to(_PACKAGE)}".encode() + file.read_bytes())
    return found.hexdigest()[:16]


def described(model: Any) -> dict[str, Any] | None:
    """The config.json that describes all of a model, wherever that lies; None for a model that is more."""
    config = None if getattr(model, "trust_remote_code", False) else getattr(model, "config", None)
    return (
        {k: v for k, v in config.items() if k != "_name_or_path"}
        if isinstance(config, Mapping)
        else None
    )


def facts_of(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """What identifies a workload, as plain data. The model is from the workload's factory, with weights or without."""
    code = Code()
    config = described(workload.model)
    functions = (
        workload.loss,
        workload.count,
        workload.optimizer,
        *([workload.split] if workload.split else []),
    )
    shapes = [(list(tensor.shape), str(tensor.dtype)) for tensor in tensors(workload.batch(1))]
    facts = {
        "model": list(_model_facts(model, code)) if config is None else [workload.task, config],
        # packed samples have many rows
        "batch": [[shape[shape[:1] == [1] :], dtype] for shape, dtype in shapes],
        "workload": [workload.summary(), workload.unit, workload.reduction, workload.varying],
        "functions": [code.of(function) for function in functions],
    }
    # then autocast leaves frozen weights in it
    if workload.keeps and "float32" in workload.keeps[1]:
        facts["frozen"] = list(workload.keeps[1])
    return facts


@dataclass
class Code:
    """The code of functions and classes as plain data, also of a notebook's cells, which have no file. A second mention
    of the same thing gives its name only, because code may call itself."""

    _visited: set[int] = field(default_factory=set)

    def of(self, thing: Any) -> Any:
        """The code of a function, class or partial function, and of the user's own code that it uses."""
        if thing is None:
            return None
        if id(thing) in self._visited:
            return getattr(thing, "__qualname__", type(thing).__qualname__)
        self._visited.add(id(thing))
        if inspect.isclass(thing):
            kinds = [kind for kind in thing.__mro__ if kind not in (nn.Module, object)]
            return [
                thing.__qualname__,
                *(self._member(*item) for kind in kinds for item in vars(kind).items()),
            ]
        if isinstance(thing, functools.partial):
            return [self.of(thing.func), _plain(thing.args), _plain(thing.keywords)]
        if getattr(thing, "__code__", None) is None:
            return [
                type(thing).__qualname__,
                self.of(type(thing)),
                _plain(getattr(thing, "__dict__", {})),
            ]
        closure = [self.used(cell.cell_contents) for cell in thing.__closure__ or ()]
        bound_to = getattr(getattr(thing, "__self__", None), "__dict__", None)
        values = [_plain(thing.__defaults__), _plain(thing.__kwdefaults__), _plain(bound_to)]
        return [
            thing.__qualname__,
            *_bytecode(thing.__code__),
            closure,
            values,
            self._globals(thing),
        ]

    def used(self, value: Any) -> Any:
        """A value that code uses: its code if it is a function or class of the user's own."""
        is_code = isinstance(value, types.FunctionType | type)
        return self.of(value) if is_code and not _is_library(value) else _plain(value)

    def _member(self, name: str, value: Any) -> Any:
        """A method or property, however it is wrapped, or a plain setting."""
        if isinstance(value, property):
            return [name, self.of(value.fget), self.of(value.fset)]
        value = getattr(value, "__func__", value)  # of a static or class method
        if isinstance(value, types.FunctionType):
            return [name, self.of(value)]
        return (
            [name, value]
            if isinstance(value, str | int | float) and not name.startswith("__")
            else None
        )

    def _globals(self, function: Any) -> Any:
        """The globals that a function of the user's own reads, also from the user's other modules."""
        if _is_library(function):
            return None
        names = sorted(_names(function.__code__))
        scope = function.__globals__
        modules = [scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)]
        scopes = [scope, *(vars(module) for module in modules if not _is_library(module))]
        return [[name, self.used(each[name])] for each in scopes for name in names if name in each]


def _model_facts(model: nn.Module, code: Code) -> Iterator[Any]:
    """Structure, settings, shapes, dtypes, what is trained, and the code and library version of every class."""
    for name, module in model.named_modules():
        class_name = f"{type(module).__module__}.{type(module).__qualname__}"
        # The attributes by which two modules of one class and the same shapes compute differently.
        attributes = {
            key: value for key, value in vars(module).items() if key[0] != "_" and key != "training"
        }
        yield (
            name,
            class_name,
            module.extra_repr(),
            {key: code.used(value) for key, value in attributes.items()},
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad
    if in_eval := stays_in_eval(model):
        yield "eval", in_eval
    for kind in sorted(
        {type(module) for module in model.modules()}, key=lambda each: each.__qualname__
    ):
        library = sys.modules.get(kind.__module__.partition(".")[0])
        yield kind.__qualname__, code.of(kind), getattr(library, "__version__", None)


def _is_library(thing: Any) -> bool:
    """Whether a module, function or class is installed: not in a notebook, a script, or a module beside one."""
    name = (
        thing.__name__
        if isinstance(thing, types.ModuleType)
        else getattr(thing, "__module__", None) or ""
    )
    root = sys.modules.get(name.partition(".")[0])
    if root is None or root.__name__ == "__main__":  # whose file in a probe is autofit's own
        return False
    file = getattr(root, "__file__", None)
    return (
        root.__name__ in sys.builtin_module_names if file is None else file.startswith(_LIBRARIES)
    )


def _names(code: types.CodeType) -> set[str]:
    inner = [
        _names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    return set(code.co_names).union(*inner)


def _bytecode(code: types.CodeType) -> list[Any]:
    constants = [
        _bytecode(each) if isinstance(each, types.CodeType) else _plain(each)
        for each in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def _plain(value: Any) -> Any:
    """A value as plain data, without what differs between two processes."""
    if callable(to_dict := getattr(value, "to_dict", None)) and not inspect.isclass(value):
        return _plain(to_dict())  # the config of a transformers model
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return value if isinstance(value, str | int | float | bool | None) else type(value).__qualname__
