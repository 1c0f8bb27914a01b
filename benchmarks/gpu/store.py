"""Where figures are kept: one line of JSON for each, written as soon as it is known; the latest of a name counts.

A machine that is lent for minutes kills what runs on it without a word: a line that it cut off is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from autofit.core.files import write_atomically

Row = dict[str, Any]


class Store:
    """Rows by stage and key, in a file that several processes may add to, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.added: Callable[[], None] = lambda: None  # called after every row
        self._rows: dict[str, dict[str, Row]] = {}
        self.reload()

    def reload(self) -> None:
        """Read what is there, also what another process has added."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        self._rows = {}
        for line in text.split("\n"):
            with contextlib.suppress(json.JSONDecodeError):  # cut off, or not yet whole
                entry = json.loads(line)
                self._keep(entry["stage"], entry["key"], entry["row"])

    def stages(self) -> list[str]:
        """The stages that there are rows of."""
        return list(self._rows)

    def rows(self, stage: str) -> dict[str, Row]:
        """The rows of a stage by their keys, in the order in which they came."""
        return dict(self._rows.get(stage, {}))

    def get(self, stage: str, key: str = "") -> Row | None:
        """One row."""
        return self._rows.get(stage, {}).get(key)

    def add(self, stage: str, key: str, row: Row) -> None:
        """Keep a row, on the disk when this returns."""
        line = json.dumps({"stage": stage, "key": key, "row": row})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(-min(1, file.tell()), os.SEEK_END)
            before = b"" if file.read() in (b"", b"\n") else b"\n"  # after a line that was cut off
            file.write(before + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._keep(stage, key, json.loads(line)["row"])  # as it will be read: tuples are lists
        self.added()

    def forget(self, stages: Iterable[str], which: Callable[[Row], Any] = lambda _: True) -> None:
        """Drop rows of some stages, those that `which` says yes to."""
        for stage in stages:
            kept = {key: row for key, row in self._rows.get(stage, {}).items() if not which(row)}
            self._rows[stage] = kept
        lines = [
            json.dumps({"stage": stage, "key": key, "row": row})
            for stage, rows in self._rows.items()
            for key, row in rows.items()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, "".join(f"{line}\n" for line in lines))

    def _keep(self, stage: str, key: str, row: Row) -> None:
        self._rows.setdefault(stage, {})[key] = row
