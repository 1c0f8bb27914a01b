"""Checkpoints of several ranks: how a failure is told. What they hold is tested where sessions of ranks resume."""

import errno
import traceback

import pytest
from torch.distributed.checkpoint import CheckpointException

from autofit.training import sharded_state


def test_what_failed_on_a_rank_is_raised_as_it_was() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    of_torch = CheckpointException(
        "write", {1: (full, traceback.StackSummary()), 3: (ValueError(), traceback.StackSummary())}
    )
    with (
        pytest.raises(OSError, match="No space left on device") as raised,
        sharded_state._as_plain_errors(),
    ):
        raise of_torch
    assert raised.value is full
