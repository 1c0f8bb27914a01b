"""What `nvidia-smi` answers under the fake CUDA, whatever it is asked: the card's UUID if so, and the MiB in use.

A script without imports of ours: nvidia-smi is also run by processes that cannot import the benchmarks.
"""

import os
import struct
import sys
from pathlib import Path
from uuid import UUID

_SLOT = struct.Struct("i4xQ")  # as memory.cpp writes it: a process, and how many bytes it holds


def used_bytes(board: Path) -> int:
    """What all living processes hold by a board; 0 where none has opened the card."""
    if not board.exists():
        return 0
    written = board.read_bytes()
    slots = _SLOT.iter_unpack(written[: len(written) // _SLOT.size * _SLOT.size])
    return sum(held for process, held in slots if process and Path(f"/proc/{process}").exists())


if __name__ == "__main__":
    # as the runtime here says
    card = f"GPU-{UUID(int=0)}, " if any("uuid" in word for word in sys.argv) else ""
    print(f"{card}{used_bytes(Path(os.environ['FAKE_CUDA_BOARD'])) >> 20}")
