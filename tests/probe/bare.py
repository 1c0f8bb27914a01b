"""Executors whose zygotes import no library, as where no card can be opened: they start at once, not in seconds."""

from collections.abc import Callable
from typing import TypeVar
from unittest import mock

from autofit.probe import Executor
from autofit.probe.executors import local
from tests import warm

Made = TypeVar("Made", bound=Executor)
# What an optimizer imports when it is made, each child would import for itself.
FIRST = "import sys, torch._dynamo; del sys.argv[2:]"


def bare(make: Callable[[], Made]) -> Made:
    """What `make` makes, for plain modules."""
    if not warm.ON_A_CARD:
        warm.import_there(["torch._dynamo"])
    with warm.zygotes(), mock.patch.object(local, "START", FIRST + local.START):
        return make()
