"""What is pinned for tests is what pyproject.toml allows: the newest in one file, the oldest in the other."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [
    Requirement(text)
    for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"])
]


def pinned(name: str) -> dict[str, Version]:
    """The versions in a file of constraints, by the name of the package in lower case, with dashes."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", package).lower(): Version(version) for package, version in pairs}


@pytest.mark.parametrize("required", REQUIRED, ids=lambda each: each.name)
def test_each_requirement_is_pinned_within_its_range(required: Requirement) -> None:
    assert pinned("constraints.txt")[required.name.lower()] in required.specifier


@pytest.mark.parametrize("required", REQUIRED, ids=lambda each: each.name)
def test_the_oldest_version_that_is_allowed_is_the_oldest_that_is_tested(
    required: Requirement,
) -> None:
    (floor,) = (Version(each.version) for each in required.specifier)
    tested = pinned("constraints-oldest.txt")[required.name.lower()]
    assert tested.release[: len(floor.release)] == floor.release
