"""State of a training run as JSON, which runs nothing when it is read.

What libraries keep (positions of loaders, random numbers) is made of a few kinds of values, and
comes back as the same kinds. An object with one key names a kind that JSON lacks:

- {"tuple": [...]}, "set" and "frozenset"
- {"bytes": "base64"}
- {"tensor": ["float32", [2, 3], "base64"]}, and "array" of numpy
- {"dict": [[key, value], ...]} for a dict with one key, or with other keys than text
"""

import base64
import json
from typing import Any

import numpy as np
import torch

from autofit.training.host_tensors import bytes_of

_SEVERAL = {kind.__name__: kind for kind in (tuple, set, frozenset)}


def encoded(value: Any) -> Any:
    """A value in those that JSON knows. Raises TypeError for one of another kind."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        dtype = str(value.dtype).removeprefix("torch.")
        return {
            "tensor": [
                dtype,
                list(value.shape),
                _base64(bytes_of(value)),
            ]
        }

    if isinstance(value, np.ndarray | np.generic) and not _holds_objects(value.dtype):
        shape = None  # of a number of numpy's own, some of which are also Python's floats
        if isinstance(value, np.ndarray):
            shape = list(value.shape)

        return {
            "array": [
                value.dtype.str,
                shape,
                _base64(value.tobytes()),
            ]
        }

    if isinstance(value, dict):
        if len(value) != 1 and all(type(key) is str for key in value):
            return {key: encoded(item) for key, item in value.items()}
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}

    if kind is list:
        return list(map(encoded, value))
    if kind in _SEVERAL.values():
        return {kind.__name__: list(map(encoded, value))}
    if kind is bytes:
        return {"bytes": _base64(value)}

    if value is None or isinstance(value, bool | int | float | str):
        return value

    raise TypeError(kind.__name__)


def _holds_objects(dtype: np.dtype[Any]) -> bool:
    """Whether an array of a dtype holds objects or named fields."""
    return bool(dtype.hasobject or dtype.names)


def _base64(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode()


def loads(text: str) -> Any:
    """The value whose encoded form was written as JSON. Raises ValueError for other text."""
    try:
        return json.loads(text, object_hook=_decoded)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"no state: {error}") from error


def _decoded(found: dict[str, Any]) -> Any:
    """The value that an object of JSON stands for."""
    if len(found) != 1:
        return found

    ((kind, content),) = found.items()
    if kind == "dict":
        return dict(content)
    if kind == "bytes":
        return base64.b64decode(content)

    if kind in _SEVERAL:
        return _SEVERAL[kind](content)

    name, shape, data = content
    values = bytearray(base64.b64decode(data))
    if kind == "array":
        array = np.frombuffer(values, np.dtype(name))
        if shape is None:
            return array[0]
        return array.reshape(shape)

    dtype = getattr(torch, name)
    if kind != "tensor" or not isinstance(dtype, torch.dtype):
        raise KeyError(kind)

    return torch.from_numpy(np.frombuffer(values, np.uint8)).view(dtype).reshape(shape)
