"""Token ids and labels in files: written one after the other, and read where a batch needs them.

A batch is made of slices of files that may be larger than the memory, so they are neither loaded
nor mapped: what was read once does not count as memory of the process.
"""

import contextlib
import errno
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from autofit.core.errors import InputError, describe_error

_PART = 2**22  # numbers that are looked at at once
_KINDS = ("u1", "i1", "u2", "i2", "u4", "i4", "i8")  # of whole numbers, the smallest first


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Raise an InputError where what was made of the data cannot be read any more inside."""
    try:
        yield
    except OSError as error:
        message = f"what was made of the data cannot be read any more: {describe_error(error)}."
        raise InputError(message, "Start again: what is gone is made anew.") from error


class Tokens(Protocol):
    """Numbers of which a slice is taken: a tensor, or a file of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class TokenFile:
    """Numbers in a file, one after the other.

    Attributes:
        kind: their type, as NumPy names it.
        largest: the largest one; 0 where there is none.
    """

    path: Path
    kind: str
    count: int
    largest: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: slice) -> torch.Tensor:
        start, stop, _ = place.indices(self.count)
        count = max(0, stop - start)
        size = np.dtype(self.kind).itemsize
        nbytes = count * size

        with readable():
            read = os.pread(self._descriptor, nbytes, start * size)
            if len(read) != nbytes:
                raise OSError(errno.EIO, "it was cut off", str(self.path))

        stored = np.frombuffer(read, self.kind)
        return torch.from_numpy(stored.astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file, which another process opens anew."""
        return {key: value for key, value in vars(self).items() if key != "_descriptor"}

    @functools.cached_property
    def _descriptor(self) -> int:
        """The open file."""
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)

        return descriptor


@dataclass(frozen=True)
class Joined:
    """Two files as one; a slice lies in either."""

    first: Tokens
    second: Tokens

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, place: slice) -> torch.Tensor:
        start, stop, _ = place.indices(len(self))
        before = len(self.first)

        if stop <= before:
            return self.first[start:stop]
        return self.second[start - before : stop - before]


def largest(tokens: Tokens) -> int:
    """The largest of them; 0 where there is none."""
    if isinstance(tokens, TokenFile):
        return tokens.largest
    if isinstance(tokens, Joined):
        return max(largest(tokens.first), largest(tokens.second))

    every = tokens[: len(tokens)]
    return int(every.max()) if len(every) else 0


class TokenWriter:
    """Writes numbers to a file, in the smallest type that holds what is to come."""

    def __init__(self, path: Path, least: int, most: int) -> None:
        self._path = path
        self._kind = next(np.dtype(kind) for kind in _KINDS if _holds(kind, least, most))
        path.touch()
        self.count = 0
        self._largest = 0

    def write(self, numbers: Any) -> None:
        """Append numbers."""
        if not len(numbers):
            return

        self._largest = max(self._largest, int(numbers.max()))
        self.count += len(numbers)
        with self._path.open("ab") as file:
            file.write(numbers.astype(self._kind).tobytes())

    def replace(self, others: Sequence[int]) -> None:
        """Write others[n] for each number n that is not negative."""
        table = np.array(others, np.int64)
        self._largest = int(table.max(initial=0))
        if not self.count:  # an empty file cannot be mapped
            return

        numbers = np.memmap(self._path, self._kind, "r+")
        for start in range(0, self.count, _PART):
            part = numbers[start : start + _PART]
            is_number = part >= 0
            part[is_number] = table[part[is_number]]

        numbers.flush()

    def facts(self) -> dict[str, Any]:
        """What a TokenFile is made of, but for the path."""
        return {
            "kind": self._kind.str,
            "count": self.count,
            "largest": self._largest,
        }


def _holds(kind: str, least: int, most: int) -> bool:
    """Whether a type holds all whole numbers from `least` to `most`."""
    limits = np.iinfo(kind)
    return limits.min <= least and most <= limits.max
