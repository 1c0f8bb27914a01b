"""Messages arrive whole or not at all."""

import pickle
import socket
import threading
from collections.abc import Iterator

import pytest

from autofit.probe.messages import Died, Job, Returned, TimedOut, receive, send

MEGABYTES = bytes(range(256)) * (3 << 12)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.mark.parametrize(
    "message",
    [Job(b"\0payload", "/a/log", 1.5), Returned(b""), Returned(MEGABYTES), Died(9, None), Died(None, 1), TimedOut()],
    ids=["job", "nothing", "megabytes", "signal", "code", "timeout"],
)
def test_round_trip(ends: tuple[socket.socket, socket.socket], message: object) -> None:
    here, there = ends
    sender = threading.Thread(target=send, args=(here, message))  # a large one waits until it is read
    sender.start()
    assert receive(there) == message
    sender.join()


def test_messages_keep_their_order_and_their_borders(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    messages = [Job(b"x" * size, str(size), size) for size in (0, 1, 7, 8, 9, 1000)]
    for message in messages:
        send(here, message)
    assert [receive(there) for _ in messages] == messages


@pytest.mark.parametrize("sent", [0, 3, 8, 20], ids=["nothing", "half a length", "a length", "half a message"])
def test_the_other_side_gone_is_an_end_of_file(ends: tuple[socket.socket, socket.socket], sent: int) -> None:
    here, there = ends
    data = pickle.dumps(Returned(b"never whole"))
    here.sendall((len(data).to_bytes(8, "big") + data)[:sent])
    here.close()
    with pytest.raises(EOFError):
        receive(there)


def test_a_reset_connection_is_an_end_of_file(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    send(there, TimedOut())  # unread when its reader closes, which resets the connection
    here.close()
    with pytest.raises(EOFError):
        receive(there)
