"""A zygote that is started before it is needed: whoever needs one first takes it, and else it ends."""

import os
import subprocess
import sys

import pytest

from autofit.core import zygote_process
from autofit.core.zygote_process import environment_of_zygote, started_early, taken


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote_process, "START", "import time\ntime.sleep(600)")


def test_it_is_taken_once() -> None:
    with started_early():
        early = taken(environment_of_zygote())
        assert early and taken(environment_of_zygote()) is None
    assert early.process.poll() is None  # it is the taker's to end
    early.process.kill()
    early.process.wait()
    early.close()
    assert early.printed() == b""


def test_what_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with started_early():
        (early,) = zygote_process._early
        monkeypatch.setattr(sys, "path", ["/elsewhere", *sys.path])
        assert taken(environment_of_zygote()) is None  # it would import from other places
    assert early.process.poll() is not None
    assert not zygote_process._early


IMPORTS = """
from autofit.core import zygote_process as it
with it.started_early(()):
    import bitsandbytes, datasets, peft, transformers.modeling_utils
    now = it.environment_of_zygote()
    assert it.taken(now), set(now.items()) ^ set(it._early[0].environment.items())
"""


def test_what_libraries_set_as_they_are_imported_is_no_reason_against_it() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
