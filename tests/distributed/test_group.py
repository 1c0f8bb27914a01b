"""Errors of a group: which rank's fault they are."""

import pytest

from autofit.distributed.group import is_of_a_peer


@pytest.mark.parametrize(
    ("message", "of_a_peer"),
    [
        ("[/pytorch/pair.cc:534] Connection closed by peer [127.0.0.1]:21", True),
        # of one exchange, while another one timed out
        ("Application timeout caused pair closure", True),
        (
            "[/pytorch/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
            True,
        ),
        ("NCCL communicator was aborted on rank 0.", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_errors_of_peers_are_told_from_ones_own(message: str, of_a_peer: bool) -> None:
    assert is_of_a_peer(message) == of_a_peer
