"""Executors whose zygotes import no library, as where no card can be opened: they start in two seconds, not in five."""

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from autofit.probe import Executor
from autofit.probe.executors import local

Made = TypeVar("Made", bound=Executor)
# What an optimizer imports when it is made, each child would import for itself.
_START = "import runpy, torch._dynamo; runpy.run_module('autofit.probe.zygote', run_name='__main__')"


def bare(make: Callable[[], Made]) -> Made:
    """What `make` makes, for plain modules."""

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        python, *_, descriptor = command
        return subprocess.Popen([python, "-P", "-c", _START, descriptor, "--bare"], **options)

    with mock.patch.object(local, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start})):
        return make()
