"""A worker that stands for a zygote elsewhere, over an actor whose answers the test gives."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autofit.core.errors import ProbeError
from autofit.probe.executors.far import FarWorker, LostError, Zygote
from autofit.probe.zygote import Ended, Job
from tests.probe.executors.fake_ray import Reference

JOB = Job(b"", "0001.log", 60.0)


class Answering:
    """An actor's handle; `asked` holds a reference for each call."""

    def __init__(self) -> None:
        self.asked: list[Reference] = []
        self.stopped: list[int] = []
        self.call = SimpleNamespace(remote=self._call)
        self.stop = SimpleNamespace(remote=self.stopped.append)

    def _call(self, number: int, job: Job) -> Reference:
        self.asked.append(Reference())
        return self.asked[-1]


@pytest.fixture
def actor() -> Answering:
    return Answering()


@pytest.fixture
def worker(actor: Answering, tmp_path: Path) -> Any:
    with FarWorker(actor, tmp_path / "probes", 60.0) as worker:
        yield worker


def test_an_answer_that_comes_late_is_not_taken_for_the_next_ones(
    actor: Answering, worker: FarWorker
) -> None:
    for late_before_the_next in (True, False):
        worker.send(JOB)
        with pytest.raises(LostError, match="does not answer"):
            worker.receive(0.01)
        late = actor.asked[-1].answer
        if late_before_the_next:
            late.set_result((Ended(b"late", 0), b""))
        worker.send(JOB)
        if not late_before_the_next:
            late.set_result((Ended(b"late", 0), b""))
        with pytest.raises(LostError):
            worker.receive(0.01)
        worker.send(JOB)
        actor.asked[-1].answer.set_result((Ended(b"right", 0), b""))
        assert worker.receive(60.0).payload == b"right"


def test_its_log_comes_along_and_its_folder_may_be_gone(
    actor: Answering, worker: FarWorker, tmp_path: Path
) -> None:
    worker.send(JOB)
    actor.asked[0].answer.set_result((Ended(b"", 1, "the last line"), b"much\nthe last line\n"))
    assert worker.receive(60.0).last_line == "the last line"
    assert (tmp_path / "probes" / "0001.log").read_bytes() == b"much\nthe last line\n"


def test_what_ends_the_actor_or_its_zygote_is_a_loss(actor: Answering, worker: FarWorker) -> None:
    worker.send(JOB)
    actor.asked[0].answer.set_exception(RuntimeError("the actor died"))
    with pytest.raises(LostError, match="a node of the cluster was lost"):
        worker.receive(60.0)
    worker.send(JOB)
    actor.asked[1].answer.set_result(
        (ProbeError("the process that starts probes ended: killed by SIGKILL."), b"")
    )
    with pytest.raises(LostError, match="killed by SIGKILL"):
        worker.receive(60.0)


def test_given_up_it_says_so_at_once(actor: Answering, worker: FarWorker) -> None:
    worker.send(JOB)
    worker.stop()
    assert actor.stopped == [1]
    worker.give_up()
    for late in (lambda: worker.receive(60.0), lambda: worker.send(JOB), worker.stop):
        with pytest.raises(ProbeError, match="given up"):
            late()


def test_a_call_that_was_stopped_before_it_came_does_not_start() -> None:
    zygote = Zygote(str(Path.cwd()), [])
    zygote._local = SimpleNamespace(logs=Path())  # type: ignore[assignment]
    zygote.stop(3)
    assert zygote.call(3, JOB) == (Ended(b"", None), b"")
