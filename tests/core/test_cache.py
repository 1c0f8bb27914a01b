from pathlib import Path

import pytest

from autofit.core.cache import cache_file, digest, keep


def test_files_lie_where_the_user_wants_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file("rates", "a.json") == tmp_path / "autofit" / "rates" / "a.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # which the specification treats as unset
    assert cache_file("rates", "a.json") == Path.home() / ".cache" / "autofit" / "rates" / "a.json"


def test_what_is_kept_is_there_and_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    keep(path, "one")
    keep(path, "two")
    assert path.read_text(encoding="utf-8") == "two"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_where_nothing_can_be_written_nothing_happens(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    keep(tmp_path / "file" / "below", "text")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


def test_names_tell_texts_apart() -> None:
    assert digest("one") == digest("one") != digest("two")
    assert len(digest("one")) == 32
