"""An example in the kernel of a real notebook: progress changes in place as HTML, and what comes back shows itself."""

import os
import queue
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

EXAMPLES = Path(__file__).parents[2] / "examples"
BRIEF = """
import autofit, dataclasses
from autofit.probe.executors import local
from autofit.tuning import annotations, forecast, measured as tune
from tests.probe.bare import FIRST
local.START = FIRST + local.START  # the model is a plain one
def predict_all(*_, **__): raise autofit.ProbeError('not here.')  # predicting takes its time
forecast.predict_all = predict_all
annotations.Annotator.timelines = lambda *_: {}  # nor are steps followed afterwards
annotations.Annotator.on_devices = lambda *_: ()
tune.EXPLORE_PLAN = dataclasses.replace(tune.EXPLORE_PLAN, max_seconds=0.3)
tune.VERIFY_PLAN = dataclasses.replace(tune.VERIFY_PLAN, max_seconds=0.3)
import classifier
trained, before, after = classifier.main(steps=20, trials=1)
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingKernelClient]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), *sys.path]))
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:  # whose paths must be short
        manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/socket")
        manager.start_kernel(cwd=str(tmp_path))
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=120)
        yield client
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str) -> list[dict[str, Any]]:
    """What a cell sends while it runs, each with its type."""
    client.execute(code)
    sent: list[dict[str, Any]] = []
    while True:
        try:
            message = client.get_iopub_msg(timeout=240)
        except queue.Empty:
            pytest.fail(f"the cell does not end: {sent[-3:]}")
        content = message["content"] | {"type": message["msg_type"]}
        if content["type"] == "error":
            pytest.fail("\n".join(content["traceback"]))
        if (
            content.get("execution_state") == "idle"
            and message["parent_header"]["msg_type"] == "execute_request"
        ):
            return sent
        sent.append(content)


def test_a_search_and_a_training_in_a_notebook(kernel: BlockingKernelClient) -> None:
    sent = run(kernel, BRIEF)
    shown = [
        each["data"] for each in sent if each["type"] in ("display_data", "update_display_data")
    ]
    # of the search and of the training, then updated
    assert sum(each["type"] == "display_data" for each in sent) == 2
    assert len(shown) > 6
    assert all(re.match(r"<pre.*>", each["text/html"]) for each in shown)
    assert any("measuring probe 1" in each["text/plain"] for each in shown)
    assert "training: 100%" in shown[-1]["text/plain"]
    assert "20/20" in shown[-1]["text/plain"]
    streams = "".join(each["text"] for each in sent if each["type"] == "stream")
    assert "accuracy on unseen points" in streams
    # no colours of a terminal
    assert not [each for each in sent if "\x1b" in str(each) or "\\x1b" in str(each)]
    # Notes; and what tqdm says to others, who use its own bar in notebooks, where the package of its widgets lacks.
    told = "".join(each["text"] for each in sent if each.get("name") == "stderr")
    assert re.fullmatch(
        r"(.*TqdmWarning.*\n.*\n)?the loss is a mean over .*\nprediction skipped: .*\n", told
    )
    for name, words in (
        ("trained", "20 (5,120 samples)"),
        ("trained.result", "verified in longer runs"),
    ):
        (answer,) = (each["data"] for each in run(kernel, name) if each["type"] == "execute_result")
        assert words in answer["text/html"]
        assert "data:image/svg+xml;base64," in answer["text/html"]
