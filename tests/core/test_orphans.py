import subprocess
import sys
from pathlib import Path

from tests.processes import number_in, wait_until_gone

SCRIPT = """
import os, sys, time
from autofit.core.orphans import die_with_parent
if os.fork() == 0:
    die_with_parent()
    with open(sys.argv[1], "w") as file:
        file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


def test_a_child_is_killed_with_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "child")]) as parent:
        child = number_in(tmp_path / "child")
        parent.kill()
        parent.wait()
        wait_until_gone([child])
