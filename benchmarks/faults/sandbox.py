"""Where tries run: in a mount namespace of their own, in which all but a scratch folder is read-only, /dev holds no
disk, and /dev/shm is private. Where the system allows no such namespace, in the scratch folder alone.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_NODES = ("null", "zero", "full", "random", "urandom")
_DISK_MIB = 96  # of the disk that tries run full
_MOUNTS = """
mount --make-rprivate /
mount --bind {writable} {writable}
mount --bind {scratch} {scratch}
mkdir -p {scratch}/dev {scratch}/disk
mount -t tmpfs -o size={disk}m none {scratch}/disk
mount -t tmpfs -o size=2g none {scratch}/dev
mkdir {scratch}/dev/shm
for each in {nodes}; do touch {scratch}/dev/$each; mount --bind /dev/$each {scratch}/dev/$each; done
ln -s /proc/self/fd {scratch}/dev/fd
for each in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${{each%:*}} {scratch}/dev/${{each#*:}}; done
mount --rbind {scratch}/dev /dev
for each in / /proc /sys; do mount -o remount,bind,ro $each; done
"""


class Sandbox:
    """The folder of all tries, and one for their table; `private` where tries reach nothing else."""

    def __init__(self, scratch: Path, writable: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.private = _unshared() and _mounted(scratch, writable)
        self.scratch = scratch
        self.disk = scratch / "disk" if self.private else scratch
        self._ballast = self.disk / "ballast"
        self._shared = self.shared_memory()
        os.environ["TMPDIR"] = str(scratch)  # for what libraries write when they are imported

    def fill(self) -> None:
        """Leave no room on the disk, where that is one of its own."""
        assert self.private, "this would fill a disk that others use"
        with self._ballast.open("wb", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2

    def empty(self) -> None:
        """Make room again."""
        self._ballast.unlink(missing_ok=True)

    def shared_memory(self) -> set[str]:
        """What lies in /dev/shm."""
        return {each.name for each in Path("/dev/shm").iterdir()}

    def left_in_shared_memory(self, processes: set[int]) -> list[str]:
        """What tries left there; without a private one, what bears the number of one of their processes."""
        found = self.shared_memory() - self._shared
        if not self.private:
            found = {
                name for name in found if {str(each) for each in processes} & set(name.split("_"))
            }
        for name in found:
            path = Path("/dev/shm", name)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return sorted(found)


def _unshared() -> bool:
    """A mount namespace of this process; also for those who may have one only with users of its own."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    if user == 0:
        return bool(libc.unshare(_NEWNS) == 0)
    if libc.unshare(_NEWNS | _NEWUSER):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return True


def _mounted(scratch: Path, writable: Path) -> bool:
    script = _MOUNTS.format(
        scratch=scratch, writable=writable, disk=_DISK_MIB, nodes=" ".join(_NODES)
    )
    done = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no sandbox, only a scratch folder: {done.stderr.strip()}")
    return done.returncode == 0
