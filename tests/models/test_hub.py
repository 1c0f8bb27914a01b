"""A hub that does not answer is reported within seconds; earlier answers come from the cache."""

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from autofit.core.errors import InputError
from autofit.models.config_json import answers_for


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The network may be asked, for what this test makes of it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.5")


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def refusal(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    start = time.monotonic()
    with pytest.raises(InputError) as caught:
        answers_for("some-org/some-model")
    assert time.monotonic() - start < 20  # of a machine under load; by itself it is half a second
    assert "\n" not in str(caught.value)
    assert (
        caught.value.remedy
        == "Check the network, or give a directory with that file; no weights are needed."
    )
    return caught.value.message


@pytest.mark.usefixtures("hub")
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    message = refusal(endpoint, monkeypatch)
    assert message.startswith(
        f"{endpoint} cannot be reached for the config.json of some-org/some-model ("
    )
    assert "refused" in message


@pytest.mark.usefixtures("hub")
def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as server:
        message = refusal(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
    assert "no answer within 0.5 s" in message or "timed out" in message


@pytest.mark.usefixtures("hub")
def test_what_was_fetched_before_needs_no_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/{revision}/{filename}",
    )
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json")
    )
    assert not answers_for("some-org/some-model")


class Refuses(http.server.BaseHTTPRequestHandler):
    """A hub that knows no model."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.usefixtures("hub")
def test_that_there_is_no_such_model_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")
    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        place = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        assert answers_for("some-org/some-model")
        serving.join()


def test_who_forbids_to_ask_has_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not answers_for("some-org/some-model")
