"""Forked processes answer, end with their parent, and are not doubled; each in a Python of its own, without threads."""

import subprocess
import sys
from pathlib import Path

from tests.processes import number_in, wait_until_gone

WITH_PARENT = """
import os, sys, time
from autofit.core.forks import die_with_parent
if os.fork() == 0:
    die_with_parent()
    with open(sys.argv[1], "w") as file:
        file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
ANSWERS = """
import os
from autofit.core.forks import forked
first, dead, raising = forked(lambda: os.getpid()), forked(lambda: os._exit(0)), forked(lambda: 1 / 0)
print(first() != os.getpid())
for each in (dead, raising):
    try:
        each()
    except EOFError:
        print("no answer")
"""
DOUBLED = """
import os
from autofit.core.forks import ending_forks
try:
    with ending_forks():
        if os.fork() == 0:
            raise ValueError("in the copy")
finally:
    print("came back", flush=True)
print(os.WEXITSTATUS(os.wait()[1]))
"""
ORPHANS = """
import os
from autofit.core.forks import adopt_orphans
adopt_orphans()
reader, writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.read(reader, 1)
        os._exit(7)
    os._exit(0)
os.wait()
os.write(writer, b"-")
print(os.WEXITSTATUS(os.wait()[1]))
"""


def said(script: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split("\n")


def test_a_child_is_killed_with_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WITH_PARENT, str(tmp_path / "child")]) as parent:
        child = number_in(tmp_path / "child")
        parent.kill()
        parent.wait()
        wait_until_gone([child])


def test_a_fork_answers_or_is_told_to_have_ended() -> None:
    assert said(ANSWERS) == ["True", "no answer", "no answer", ""]


def test_a_copy_that_comes_back_ends_and_the_first_goes_on() -> None:
    assert said(DOUBLED) == ["came back", "0", ""]


def test_the_orphans_of_a_child_become_its_parents() -> None:
    assert said(ORPHANS) == ["7", ""]
