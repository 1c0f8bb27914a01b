"""What reproduces each figure that the README claims; README.md has a line for each."""

from pathlib import Path

# A benchmark is called by its name alone, `python -m benchmarks.replay`, whichever folder it lies in.
_ROOMS = ("predictions", "searches", "training", "published", "exports")
__path__ += [str(Path(__file__).parent / room) for room in _ROOMS]
