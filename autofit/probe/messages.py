"""Messages between the parent, the zygote and its children: a length and a pickle, nothing parsed from text."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Job:
    """What a child is to do: `payload` is a cloudpickle of (function, arguments), opened in the child only."""

    payload: bytes
    log: str
    timeout: float


@dataclass(frozen=True)
class Returned:
    """The child's answer, a pickle of what the function returned."""

    payload: bytes


@dataclass(frozen=True)
class Died:
    """The child ended without an answer: killed by `signal`, or with exit code `code`."""

    signal: int | None
    code: int | None


@dataclass(frozen=True)
class TimedOut:
    """The child was killed because its time was up."""


class Ready:
    """The zygote has imported what it preloads."""


def send(connection: socket.socket, message: Any) -> None:
    """Send one message whole."""
    data = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receive one message whole.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except ConnectionResetError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
