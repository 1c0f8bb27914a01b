"""Runs commands in this process; and one search that tests of what follows a search share."""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autofit.cli import main
from tests import tiny
from tests.cli.command import MINE, PLAIN, Output, Run


def call(*arguments: object) -> Output:
    """Run a command to its end."""
    out, err = io.StringIO(), io.StringIO()
    # The zygote that tests share is there already.
    patched = mock.patch("autofit.cli.search.started_early", contextlib.nullcontext)
    with (
        patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return Output(end.value.code, out.getvalue(), err.getvalue())


def furnish(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make a folder the current one, with workloads in mine.py and a small model in llama/."""
    patch.chdir(folder)
    patch.setattr(sys, "path", list(sys.path))
    patch.setenv("COLUMNS", "200")
    (folder / "mine.py").write_text(MINE)
    (folder / "llama").mkdir()
    config = {**tiny.LLAMA, "vocab_size": 256, "architectures": ["LlamaForCausalLM"]}
    (folder / "llama" / "config.json").write_text(json.dumps(config))


@pytest.fixture
def run() -> Run:
    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, with workloads in mine.py and a small model in llama/."""
    furnish(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture(scope="session")
def search_of_three(
    executor: Any, new_cache: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Output, Path]:
    """What a search of three trials printed, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(new_cache()))
        patch.setattr(
            "autofit.tuning.measured.LocalExecutor", lambda *_: contextlib.nullcontext(executor)
        )
        furnish(folder, patch)
        return call(*PLAIN, "--trials", "3", "--json"), folder


@pytest.fixture
def searched(search_of_three: tuple[Output, Path], here: Path) -> Output:
    """The search of three trials, whose run directory stands in the current directory."""
    printed, folder = search_of_three
    shutil.copytree(folder / "run", here / "run")
    return printed
