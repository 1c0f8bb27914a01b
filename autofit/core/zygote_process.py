"""How the process of a zygote (`autofit.probe.zygote`) is started.

This page imports little, so that the command line can start a zygote before it imports torch
itself: both then import at the same time.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from autofit.core.environment import importing_alike, set_defaults

# Imports take seconds, and a fifth more with gc. Whoever is killed meanwhile takes it along.
START = """
import gc
gc.disable()
from autofit.core.forks import die_with_parent
die_with_parent()
from autofit.probe.zygote import main
main()"""
# What children find imported. Together they take 4 seconds, those of plain models half of that.
PLAIN = "autofit.probe.measure", "bitsandbytes"
TRANSFORMERS = "transformers", "transformers.modeling_utils", *PLAIN, "peft"
_early: list["ZygoteProcess"] = []


class ZygoteProcess:
    """A zygote that imports modules of these names, the socket to it, and what it printed."""

    def __init__(
        self,
        environment: Mapping[str, str],
        start: str,
        names: Sequence[str] = TRANSFORMERS,
    ) -> None:
        self.environment = environment
        self.names = names
        # No file: the run directory may not be known yet.
        self._log = os.fdopen(os.memfd_create("zygote"), "rb")

        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", start, str(theirs.fileno()), *names],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
            )

    def printed(self) -> bytes:
        """What it printed so far."""
        if self._log.closed:
            return b""
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # it appends where it is

    def close(self) -> None:
        """End the socket, which ends the zygote, and forget what it printed."""
        self.socket.close()
        self._log.close()


def environment_of_zygote() -> dict[str, str]:
    """The environment of a zygote, which imports from where this process does."""
    environment = importing_alike()

    # Ask NVML whether there is a GPU: the plain check opens CUDA, which survives no fork.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    set_defaults(environment)
    return environment


@contextlib.contextmanager
def started_early(names: Sequence[str] = TRANSFORMERS) -> Iterator[None]:
    """Inside, a zygote imports for the first executor, which takes it; else it ends with this."""
    early = ZygoteProcess(environment_of_zygote(), START, names)
    _early.append(early)

    try:
        yield
    finally:
        if early in _early:
            _early.remove(early)
            early.process.kill()
            early.process.wait()
            early.close()


def taken(environment: Mapping[str, str]) -> ZygoteProcess | None:
    """The zygote that was started early; None where there is none, or it would differ by now.

    The user's own code may set variables, and change where what is imported comes from.
    """
    if _early and _given(_early[0].environment) == _given(environment):
        return _early.pop()
    return None


def _given(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what PyTorch sets when Inductor is imported, which transformers does."""
    return {name: value for name, value in environment.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
