"""Pickles for other processes of autofit's: of functions and classes of the user's `__main__`, and
of models."""

import copyreg
import io
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def pickled(value: Any) -> bytes:
    """A value as a pickle that another process opens. Raises whatever the user's own code does."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that also takes modules with parametrizations (weight_norm).

    torch itself refuses to pickle them, since they could not be opened where their class does not
    exist. cloudpickle sends the class along.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), obj.__dict__  # type: ignore[attr-defined]

        return super().reducer_override(obj)
