"""docs/security.md names a test for what it promises, and each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_each_test_that_is_named_is_there() -> None:
    named = set(
        re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    )
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found |= set(
            re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
    assert named
    assert named <= found
