"""Fingerprints of workloads: the model's structure and code, the shapes of the data, and their use.

Workloads with equal fingerprints take the same memory and time; values of weights and data do not
matter. A model made from a config.json is identified by that. Of any other the user's code counts
too, since it may change while no shape does. Libraries are identified by their versions.
"""

import functools
import hashlib
import inspect
import itertools
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
from autofit.training.call_state import names_of
from autofit.training.model_state import stays_in_eval

# of cached results, measurements and predictions: a new number leaves all older entries unread
LAYOUT = 2
_PACKAGE = Path(__file__).parents[1]
# where libraries lie
INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


def fingerprint(workload: Workload, model: nn.Module) -> str:
    """A digest of a workload and the number of threads; the same in every process like this one.

    Raises whatever the user's own code does.
    """
    return _digest([facts_of(workload, model), torch.get_num_threads()])


def cache_key(workload: object, **conditions: Any) -> str:
    """The name of what is cached about a workload: it changes with anything that could matter.

    Args:
        workload: its fingerprint, or the facts that stand for it.
        conditions: what the cached thing depends on as well. The code of added techniques always
            counts beside them.
    """
    code = Code()
    added = [code.of(type(technique)) for technique in techniques.added_techniques()]

    return f"v{LAYOUT}-{_digest([workload, added, conditions])}"


def _digest(facts: Any) -> str:
    """A digest of plain data."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return digest(text)


@functools.cache
def own_code(*rooms: str) -> str:
    """A digest of autofit's source code in these rooms, by default in all.

    A checkout changes without its version.
    """
    found = hashlib.sha256()
    for folder in [_PACKAGE / room for room in rooms] or [_PACKAGE]:
        files = sorted(folder.rglob("*.py"))
        assert files, f"there is no code in {folder}"  # whose changes would go unnoticed

        for file in files:
            name = str(file.relative_to(_PACKAGE))
            found.update(name.encode())
            found.update(file.read_bytes())

    return found.hexdigest()[:16]


def described(model: Any) -> dict[str, Any] | None:
    """The config.json that describes all of a model, wherever it lies; None of other models."""
    if getattr(model, "trust_remote_code", False):
        return None

    config = getattr(model, "config", None)
    if not isinstance(config, Mapping):
        return None

    found = {key: value for key, value in config.items() if key != "_name_or_path"}
    changed = getattr(model, "changed", None)  # what is trained of it, and how its layers round
    if changed:
        found["changed"] = changed

    return found


def facts_of(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """What identifies a workload, as plain data.

    The model is from the workload's factory, with weights or without.
    """
    code = Code()
    config = described(workload.model)
    of_model: list[Any] = [workload.task, config]
    if config is None:
        of_model = list(_model_facts(model, code))

    of_batch = []
    for tensor in tensors(workload.batch(1)):
        shape = list(tensor.shape)
        if shape[:1] == [1]:  # packed samples have many rows
            del shape[0]

        of_batch.append([shape, str(tensor.dtype)])

    functions: list[Any] = [workload.loss, workload.count, workload.optimizer]
    frozen = [
        [name, described(factory) or code.of(factory)] for name, factory in workload.frozen.items()
    ]
    if workload.split:
        functions.append(workload.split)

    facts = {
        "model": of_model,
        "batch": of_batch,
        "workload": [
            workload.summary(),
            workload.unit,
            workload.reduction,
            workload.varying,
        ],
        "functions": list(map(code.of, functions)),
    }

    if frozen:
        facts["models"] = frozen
    # then autocast leaves frozen weights in it
    if workload.keeps and "float32" in workload.keeps[1]:
        facts["frozen"] = list(workload.keeps[1])

    return facts


@dataclass
class Code:
    """The code of functions and classes as plain data, also of a notebook's cells, without a file.

    A second mention of the same thing gives its name only, because code may call itself.
    """

    _visited: set[int] = field(default_factory=set)

    def of(self, thing: Any) -> Any:
        """The code of a function, class or partial function, and of the user's code it uses."""
        if thing is None:
            return None

        kind = type(thing)
        if id(thing) in self._visited:
            return getattr(thing, "__qualname__", kind.__qualname__)

        self._visited.add(id(thing))

        if inspect.isclass(thing):
            facts = [thing.__qualname__]
            for base in thing.__mro__:
                if base not in (nn.Module, object):
                    facts += itertools.starmap(self._member, vars(base).items())

            return facts

        if isinstance(thing, functools.partial):
            return [
                self.of(thing.func),
                _plain(thing.args),
                _plain(thing.keywords),
            ]

        if getattr(thing, "__code__", None) is None:
            attributes = getattr(thing, "__dict__", {})
            return [
                kind.__qualname__,
                self.of(kind),
                _plain(attributes),
            ]

        closure = [self.used(cell.cell_contents) for cell in thing.__closure__ or ()]
        owner = getattr(thing, "__self__", None)
        attributes = getattr(owner, "__dict__", None)
        values = [thing.__defaults__, thing.__kwdefaults__, attributes]

        return [
            thing.__qualname__,
            *_bytecode(thing.__code__),
            closure,
            list(map(_plain, values)),
            self._globals(thing),
        ]

    def used(self, value: Any) -> Any:
        """A value that code uses: its code if it is a function or class of the user's own."""
        if isinstance(value, types.FunctionType | type) and not _is_library(value):
            return self.of(value)
        return _plain(value)

    def _member(self, name: str, value: Any) -> Any:
        """A method or property, however it is wrapped, or a plain setting."""
        if isinstance(value, property):
            return [
                name,
                self.of(value.fget),
                self.of(value.fset),
            ]

        value = getattr(value, "__func__", value)  # of a static or class method
        if isinstance(value, types.FunctionType):
            return [name, self.of(value)]

        if isinstance(value, str | int | float) and not name.startswith("__"):
            return [name, value]
        return None

    def _globals(self, function: Any) -> Any:
        """The globals that a function of the user's reads, also from the user's other modules."""
        if _is_library(function):
            return None

        names = sorted(names_of(function.__code__))
        scopes = [function.__globals__]
        for name in names:
            module = function.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not _is_library(module):
                scopes.append(vars(module))

        found = []
        for scope in scopes:
            present = filter(scope.__contains__, names)
            found += [[name, self.used(scope[name])] for name in present]

        return found


def _model_facts(model: nn.Module, code: Code) -> Iterator[Any]:
    """What identifies a model.

    Structure, settings, shapes, dtypes, what is trained, and the code and library version of every
    class.
    """
    for name, module in model.named_modules():
        kind = type(module)
        # The attributes by which two modules of one class and the same shapes compute differently.
        attributes = {}
        for key, value in vars(module).items():
            if key[0] != "_" and key != "training":
                attributes[key] = code.used(value)

        class_name = f"{kind.__module__}.{kind.__qualname__}"
        yield name, class_name, module.extra_repr(), attributes

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad

    in_eval = stays_in_eval(model)
    if in_eval:
        yield "eval", in_eval

    kinds = set(map(type, model.modules()))
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        library = sys.modules.get(kind.__module__.partition(".")[0])
        version = getattr(library, "__version__", None)
        yield kind.__qualname__, code.of(kind), version


def _is_library(thing: Any) -> bool:
    """Whether a module, function or class is installed.

    It is not in a notebook, a script, or a module beside one.
    """
    attribute = "__name__" if isinstance(thing, types.ModuleType) else "__module__"
    name = getattr(thing, attribute, None) or ""
    root = sys.modules.get(name.partition(".")[0])
    if root is None or root.__name__ == "__main__":  # whose file in a probe is autofit's own
        return False

    file = getattr(root, "__file__", None)
    if file is None:
        return root.__name__ in sys.builtin_module_names

    return bool(file.startswith(INSTALLED))


def _bytecode(code: types.CodeType) -> list[Any]:
    """What a function does, without its file and line numbers."""
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_bytecode(constant))
        else:
            constants.append(_plain(constant))

    return [
        code.co_code.hex(),
        list(code.co_names),
        constants,
    ]


def _plain(value: Any) -> Any:
    """A value as plain data, without what differs between two processes."""
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict) and not inspect.isclass(value):
        return _plain(to_dict())  # the config of a transformers model

    if callable(value):
        return getattr(
            value,
            "__qualname__",
            type(value).__qualname__,
        )

    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, str | int | float | bool | None):
        return value

    return type(value).__qualname__
