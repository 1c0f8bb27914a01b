"""`file.py:function` and `package.module:function`: a workload made by the user's own code.

Probe processes inherit the import path but cannot import a file that was loaded under a made-up
name, so such a file is registered to be pickled by value.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from autofit.core.errors import InputError, as_input_error, describe_error, unknown
from autofit.core.files import check_regular, expanded
from autofit.core.workload import Workload


def is_function(text: str) -> bool:
    """Whether the text has the form `file.py:function` or `package.module:function`."""
    module, colon, function = text.rpartition(":")
    if not colon:
        return False
    if module.endswith(".py"):
        return True
    return all(part.isidentifier() for part in (*module.split("."), function))


def function_workload(
    reference: str,
    *,
    sequence_length: int | None = None,
    effective_batch_size: int | None = None,
) -> Workload:
    """Load the module, call the function, and take its workload.

    Raises:
        InputError: no such file, module or function; either of them raised; not a Workload came
            back; or another sequence length was asked for than the function's data has.
    """
    module_name, _, name = reference.rpartition(":")
    make_importable(reference)
    source = reference
    stem = module_name
    if module_name.endswith(".py"):
        path = expanded(module_name).absolute()
        module = _load_file(path)
        source = f"{path}:{name}"
        stem = path.stem
    else:
        module = _load_module(module_name)

    function = _function(module, name, module_name)
    with _blamed_on_user(f"calling {reference}"):
        workload = function()
    if not isinstance(workload, Workload):
        message = f"{reference} returned {_article(workload)}, not a Workload."
        raise InputError(message, "Let the function return autofit.Workload(model=..., batch=...).")

    own = workload.sequence_length
    if sequence_length not in (None, own):
        message = f"the sequence length of {reference} is its own ({own or 'none'})"
        message += f" and cannot be set to {sequence_length}."
        raise InputError(message, "Change it in the function.")

    changes: dict[str, Any] = {"source": {"kind": "function", "function": source}}
    if workload.name == "custom":
        changes["name"] = f"{stem}.{name}"
    if effective_batch_size is not None:
        changes["effective_batch_size"] = effective_batch_size

    return dataclasses.replace(workload, **changes)


def names_transformers(reference: str) -> bool:
    """Whether the file of a function names Hugging Face's libraries; True for a module, whose file
    only importing its packages would find."""
    module, _, _ = reference.rpartition(":")
    if not module.endswith(".py"):
        return True

    with contextlib.suppress(OSError):  # told when it is loaded
        code = check_regular(expanded(module)).read_bytes()
        return re.search(rb"transformers|peft", code) is not None

    return True


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is no regular file" if path.exists() else "is not there"
        raise InputError(f"the file {path} {what}.", "Check the path before the colon.")

    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    stem = re.sub(r"\W", "_", path.stem)
    name = f"autofit_workload_{stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path  # it is a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        with _blamed_on_user(f"importing {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise

    cloudpickle.register_pickle_by_value(module)

    return module


def _load_module(name: str) -> ModuleType:
    try:
        with _blamed_on_user(f"importing {name}"):
            return importlib.import_module(name)
    except InputError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            message = f"there is no module {cause.name}."
            raise InputError(
                message, "Give file.py:function, or run autofit where it can be imported."
            ) from cause

        raise


def make_importable(reference: str) -> None:
    """Let modules beside a function's be imported: now, by functions called later, and by probes,
    which inherit the path."""
    module_name, _, _ = reference.rpartition(":")
    folder = Path.cwd()
    if module_name.endswith(".py"):
        folder = expanded(module_name).absolute().parent

    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # first, as Python does for a script
    importlib.invalidate_caches()


def _function(module: ModuleType, name: str, label: str) -> Callable[[], object]:
    """A function of a user's module; `label` is what errors call that.

    Raises:
        InputError: there is none of that name, or it is no function.
    """
    functions = []
    for key, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module.__name__
        if is_own and callable(value) and not key.startswith("_"):
            functions.append(key)

    if not functions and not hasattr(module, name):
        remedy = "Write one that returns autofit.Workload(model=..., batch=...)."
        raise InputError(f"{label} has no functions.", remedy)
    if not name:
        remedy = f"Write {label}:NAME, with one of {', '.join(functions)}."
        raise InputError(f"{label}: names no function.", remedy)
    if not hasattr(module, name):
        raise unknown(f"{label} function", name, functions)

    function = getattr(module, name)
    if not callable(function):
        message = f"{name} in {label} is not a function but {_article(function)}."
        raise InputError(message, f"Write def {name}(): and return a Workload from it.")

    return function  # type: ignore[no-any-return]  # a user's attribute has no type


def _blamed_on_user(doing: str) -> AbstractContextManager[None]:
    # SystemExit, too: of a script without `if __name__ == "__main__"`
    return as_input_error(
        lambda error: f"{doing} failed{_where(error)}: {describe_error(error)}.",
        "Correct the code.",
    )


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code: not autofit's, not a library's or an importer's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"

    own = str(Path(__file__).parents[1])
    libraries = ["<", own]
    libraries += [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(tuple(libraries)):
            return f" at {frame.filename}:{frame.lineno}"

    return ""


def _article(value: object) -> str:
    """What a value is, with its article."""
    if value is None:
        return "None"

    name = type(value).__name__
    if name[0].lower() in "aeiou":
        return f"an {name}"
    return f"a {name}"
