"""State of a training run as JSON, which runs nothing when it is read. What libraries keep (positions of loaders,
random numbers) is made of a few kinds of values, and comes back as the same kinds.

An object with one key names a kind that JSON lacks: {"tuple": [...]}, {"bytes": "base64"}, {"tensor": ["float32",
[2, 3], "base64"]} and "array" of numpy, {"dict": [[key, value], ...]} for a dict with one key or with other keys than
text.
"""

import base64
import json
from typing import Any

import numpy as np
import torch

_SEVERAL = {kind.__name__: kind for kind in (tuple, set, frozenset)}


def encoded(value: Any) -> Any:
    """A value in those that JSON knows. Raises TypeError for one of another kind."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(data)]}
    if isinstance(value, np.ndarray | np.generic) and not (
        value.dtype.hasobject or value.dtype.names
    ):
        # a number of numpy's own
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"array": [value.dtype.str, shape, _text(value.tobytes())]}
    if isinstance(value, dict):
        if len(value) != 1 and all(type(key) is str for key in value):
            return {key: encoded(each) for key, each in value.items()}
        return {"dict": [[encoded(key), encoded(each)] for key, each in value.items()]}
    if kind is list:
        return [encoded(each) for each in value]
    if kind in _SEVERAL.values():
        return {kind.__name__: [encoded(each) for each in value]}
    if kind is bytes:
        return {"bytes": _text(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(kind.__name__)


def loads(text: str) -> Any:
    """The value whose encoded form was written as JSON. Raises ValueError for other text."""
    try:
        return json.loads(text, object_hook=_decoded)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"no state: {error}") from error


def _decoded(found: dict[str, Any]) -> Any:
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
        return array[0] if shape is None else array.reshape(shape)
    if kind != "tensor" or not isinstance(dtype := getattr(torch, name), torch.dtype):
        raise KeyError(kind)
    return torch.from_numpy(np.frombuffer(values, np.uint8)).view(dtype).reshape(shape)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
