"""A reader that goes before all is said, as `autofit ... | head -1` has it."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", [["spaces"], ["models", "--json"], ["tune", "--help"]])
def test_it_is_told_in_a_sentence(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "autofit", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    message = "autofit: the answer cannot be printed: Broken pipe. Give stdout somewhere to go.\n"
    assert (done.returncode, done.stderr) == (2, message)
