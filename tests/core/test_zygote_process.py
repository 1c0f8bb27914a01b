"""A zygote that is started before it is needed: whoever needs one first takes it, and else it ends."""

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
