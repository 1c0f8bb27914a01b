"""Memory that runs out while the command is imported ends it with a sentence."""

import errno
import json
import subprocess
import sys

import pytest

from autofit.core.errors import lacks_memory

_LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0})); "
_RUN = "from autofit.__main__ import main; main({1!r})"


def limited(nbytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that may have so many bytes of address space."""
    code = (_LIMITED + _RUN).format(nbytes, list(arguments))
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize("as_json", [False, True])
def test_one_sentence_and_exit_code_4(as_json: bool) -> None:
    done = limited(350_000_000, "spaces", *["--json"][: int(as_json)])
    assert done.returncode == 4, done.stderr
    assert done.stderr == (
        "autofit: this machine's memory is full. Free some; what was kept goes on with --resume.\n"
    )
    if as_json:
        assert json.loads(done.stdout)["error"]["message"] == "this machine's memory is full."
    else:
        assert done.stdout == ""


@pytest.mark.parametrize("command", ["search", "estimate", "train", "doctor"])
def test_a_limit_of_address_space_is_told_before_libraries_meet_it(command: str) -> None:
    done = limited(900_000 * 1024, command, "--model", "tiny-llama")
    assert done.returncode == 4, done.stderr
    assert done.stderr == (
        "autofit: this process is limited to 0.86 GiB of address space (ulimit -v), and what it "
        "imports takes 1.5. Raise that limit.\n"
    )


def test_what_tells_of_no_memory() -> None:
    assert lacks_memory(MemoryError())
    assert lacks_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert lacks_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    outer = ValueError("numpy could not be imported")
    outer.__cause__ = ImportError("libopenblas.so: failed to map segment from shared object")
    assert lacks_memory(outer)
    assert not lacks_memory(ImportError("No module named 'torch'"))
    assert not lacks_memory(OSError(errno.ENOSPC, "No space left on device"))
    circle = ValueError()
    circle.__cause__ = circle
    assert not lacks_memory(circle)
