"""The user's cache directory, for what can be found out again: that it cannot be written fails nothing."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from autofit.core.run_directory import write_whole


def cache_file(kind: str, name: str) -> Path:
    """Where a file of that kind and name is kept, by the XDG base directory specification."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "autofit" / kind / name


def digest(text: str) -> str:
    """A name for a file, the same for the same text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def keep(path: Path, text: str) -> None:
    """Write a file of the cache, if it can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError:
        return
