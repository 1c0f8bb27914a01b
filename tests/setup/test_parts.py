"""What is installed: each thing is looked up once in a process."""

import importlib.util

import pytest

from autofit.setup import parts


def test_each_module_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: asked.append(name))
    parts.installed.cache_clear()
    assert not any(parts.installed("no_such_module") for _ in range(3))
    assert asked == ["no_such_module"]
    parts.installed.cache_clear()


def test_it_is_what_can_be_imported() -> None:
    assert parts.installed("torch")
    assert not parts.installed("no_such_module")
