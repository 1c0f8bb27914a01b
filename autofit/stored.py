"""Results of earlier searches, found again by what they depend on: model, shape of the data, options, machine.

Only what `fit` would find by measuring again is stored, as the result.yaml it has; weights are no part of it. The
parent of probes does not touch the device, so the machine is told by what the system says of it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import platform
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from autofit import techniques
from autofit.core import cache
from autofit.core.errors import InputError
from autofit.core.options import SearchOptions
from autofit.core.result import SavedResult
from autofit.core.workload import Workload
from autofit.training.data import tensors
from autofit.tune import versions

_NOT_WHAT_IS_FOUND = {"out", "resume", "probe_timeout"}


def key_of(workload: Workload, options: SearchOptions) -> str:
    """The same for two searches that would measure the same; another for any change that could matter."""
    facts = {
        "model": list(_model_facts(workload.model())),
        "batch": [[list(each.shape[1:]), str(each.dtype)] for each in tensors(workload.batch(1))],
        "workload": [workload.summary(), workload.unit, workload.reduction],
        "functions": [_code(each) for each in (workload.loss, workload.count, workload.optimizer)],
        "options": options.model_dump(mode="json", exclude=_NOT_WHAT_IS_FOUND),
        "space": _space_text(options.space),
        "knobs": [_code(type(each)) for each in techniques.added_techniques()],
        "machine": list(_machine()),
        "versions": versions(),
    }
    return cache.digest(json.dumps(facts, sort_keys=True, default=str))


def find(key: str) -> Path | None:
    """The result.yaml stored under a key; None where there is none that can be read."""
    try:
        SavedResult.load(_path(key))
    except InputError:
        return None
    return _path(key)


def keep(key: str, text: str) -> None:
    """Store a result.yaml."""
    cache.keep(_path(key), text)


def describe(saved: SavedResult) -> str:
    """A stored result in a sentence."""
    rate = saved.measured.get("tokens_per_second") or saved.measured.get("samples_per_second")
    unit = "tokens/s" if saved.measured.get("tokens_per_second") else "samples/s"
    return f"a search for this model, data and machine was done before ({rate:,.0f} {unit} measured) and is used again"


def _path(key: str) -> Path:
    return cache.cache_file("results", f"{key}.yaml")


def _model_facts(model: nn.Module) -> Iterator[Any]:
    """Structure, settings, shapes, formats, what is trained, and the code of every class in it."""
    for name, module in model.named_modules():
        yield name, f"{type(module).__module__}.{type(module).__qualname__}", module.extra_repr(), _settings(module)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad
    for kind in sorted({type(module) for module in model.modules()}, key=lambda each: each.__qualname__):
        yield kind.__qualname__, _code(kind)


def _settings(module: nn.Module) -> Any:
    """The attributes by which two modules of one class and the same shapes compute differently."""
    return _plain({name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"})


def _code(thing: Any) -> Any:
    """What tells two versions of a function or class apart, also of a notebook's cell, which has no file."""
    if thing is None:
        return None
    if inspect.isclass(thing):
        kinds = [each for each in thing.__mro__ if each not in (nn.Module, object)]
        functions = [each for kind in kinds for each in vars(kind).values() if isinstance(each, types.FunctionType)]
        return [thing.__qualname__, *(_code(each) for each in functions)]
    if isinstance(thing, functools.partial):
        return [_code(thing.func), _plain(thing.args), _plain(thing.keywords)]
    code = getattr(thing, "__code__", None)
    if code is None:
        return [type(thing).__qualname__, _code(type(thing)), _plain(getattr(thing, "__dict__", {}))]
    closed_over = [_plain(cell.cell_contents) for cell in thing.__closure__ or ()]
    return [thing.__qualname__, *_of_code(code), closed_over, _plain(thing.__defaults__)]


def _plain(value: Any) -> Any:
    """A value that a function closes over, without what differs between two processes."""
    if callable(to_dict := getattr(value, "to_dict", None)) and not inspect.isclass(value):
        return _plain(to_dict())  # the config of a transformers model
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else type(value).__qualname__


def _of_code(code: types.CodeType) -> list[Any]:
    constants = [_of_code(each) if isinstance(each, types.CodeType) else _plain(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), constants]


def _space_text(space: str | None) -> str | None:
    """What a space of one's own says now; a shipped one is told by its name and autofit's version."""
    own = Path(space) if space else None
    return own.read_text(encoding="utf-8") if own and own.is_file() else space


def _machine() -> Iterator[Any]:
    yield platform.machine(), platform.processor(), psutil.cpu_count(logical=False), psutil.virtual_memory().total
    yield os.environ.get("CUDA_VISIBLE_DEVICES")
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        yield card.read_text(encoding="utf-8", errors="replace")
