"""Memory of the host, of which a container may have less than the machine."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autofit.core.hardware import GIB
from autofit.hardware.device import host_memory

NO_LIMIT = 9223372036854771712  # as version 1 writes it


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=40 * GIB)
    )


def found(folder: Path, groups: str) -> tuple[float, float]:
    """GiB in all and free, by a file of groups and the folder of control groups."""
    (folder / "groups").write_text(groups)
    seen = host_memory(folder / "groups", folder)
    return seen.total / GIB, seen.free / GIB


def group_2(folder: Path, limit: object, used: int = 0, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 7\n")


def group_1(folder: Path, limit: int, used: int, files: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {files}\n")


def test_a_container_has_its_limit_less_what_it_uses_but_for_files_the_kernel_drops(
    tmp_path: Path,
) -> None:
    group_2(tmp_path, 16 * GIB, used=6 * GIB, files=2 * GIB)
    assert found(tmp_path, "0::/\n") == (16, 12)


def test_so_it_has_by_version_1(tmp_path: Path) -> None:
    group_1(tmp_path / "memory" / "docker" / "a1", 16 * GIB, used=6 * GIB, files=2 * GIB)
    assert found(tmp_path, "3:cpu,cpuacct:/\n2:memory:/docker/a1\n0::/\n") == (16, 12)


def test_a_group_whose_name_is_the_hosts_is_at_the_root(tmp_path: Path) -> None:
    group_1(tmp_path / "memory", 16 * GIB, used=6 * GIB, files=0)
    assert found(tmp_path, "2:memory:/docker/a1\n") == (16, 10)


def test_the_narrowest_of_nested_groups_counts(tmp_path: Path) -> None:
    group_2(tmp_path / "pod", 20 * GIB, used=15 * GIB)
    group_2(tmp_path / "pod" / "box", 16 * GIB, used=GIB)
    assert found(tmp_path, "0::/pod/box\n") == (16, 5)


@pytest.mark.parametrize("limit", ["max", NO_LIMIT, 128 * GIB])
def test_no_limit_or_a_larger_one_leaves_what_the_machine_has(
    tmp_path: Path, limit: object
) -> None:
    group_2(tmp_path, limit, used=GIB)
    assert found(tmp_path, "0::/\n") == (64, 40)


def test_more_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    group_2(tmp_path, GIB, used=2 * GIB)
    assert found(tmp_path, "0::/\n") == (1, 0)


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    assert found(tmp_path, "0::/\n2:memory:/docker/a1\n1:name=systemd:/\n") == (64, 40)
    assert host_memory(tmp_path / "none", tmp_path) == (64 * GIB, 40 * GIB)
    (tmp_path / "memory.max").write_text(str(16 * GIB))  # but not what is used of it
    assert found(tmp_path, "0::/\n") == (64, 40)
