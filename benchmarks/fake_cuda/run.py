"""The command: takes its options, makes the environment in which there seems to be a card, and runs what is given."""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.fake_cuda import __doc__ as about
from benchmarks.fake_cuda.library import HERE, LIBRARY, FakeCudaError, build


@dataclass(frozen=True)
class Card:
    """What the card seems to be, and what a process's context takes of it."""

    name: str = "NVIDIA H200"
    gib: float = 140.0
    context_mib: int = 520


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command as on a machine with a card; its exit code, or 2 and a sentence where that cannot be."""
    card, command = parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        refuse_where_useless()
        built = build()
    except FakeCudaError as error:
        print(f"fake_cuda: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fake-cuda-") as fresh:
        return _run(command, environment(os.environ, card, built, Path(fresh) / "board"))


def parsed(arguments: Sequence[str]) -> tuple[Card, list[str]]:
    """The card and the command asked for; what comes after the first `--` is the command's own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fake_cuda",
        usage="%(prog)s [--name NAME] [--gib N] [--context-mib N] -- COMMAND...",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--name", default=Card.name, help="what the card is called (default: %(default)s)"
    )
    parser.add_argument(
        "--gib", type=_gib, default=Card.gib, help="its memory in GiB (default: %(default)g)"
    )
    parser.add_argument(
        "--context-mib",
        type=_mib,
        default=Card.context_mib,
        help="what each process takes (default: %(default)s)",
    )
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    command = arguments[end + 1 :]
    if not command:
        parser.error("say after -- what to run")
    return Card(options.name, options.gib, options.context_mib), command


def _gib(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is no size in GiB")
    return number


def _mib(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is no size in MiB")
    return number


def refuse_where_useless() -> None:
    """Asked before anything is set, so that the answer is of the machine as it is.

    Raises:
        FakeCudaError: PyTorch knows no CUDA 13, or there is a card already.
    """
    here = f"PyTorch {torch.__version__} is built"
    if torch.version.cuda is None:
        raise FakeCudaError(
            f"{here} without CUDA; on Linux, `pip install torch` from PyPI is built with it."
        )
    if torch.cuda.is_available():
        raise FakeCudaError(
            f"There is a card already, {torch.cuda.get_device_name(0)}: run the command without this."
        )
    if not torch.version.cuda.startswith("13."):
        raise FakeCudaError(f"{here} for CUDA {torch.version.cuda}; this stands in for CUDA 13.")


def environment(outer: Mapping[str, str], card: Card, built: Path, board: Path) -> dict[str, str]:
    """An environment in which programs find the card; what `outer` already has in a path comes after what is added."""

    def before(name: str, *added: Path) -> str:
        return os.pathsep.join([*map(str, added), *filter(None, [outer.get(name)])])

    home = Path(outer.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # One card, as if nothing had been said of which are to be seen.
    inner = {name: value for name, value in outer.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {
        "HF_HOME": str(home / "huggingface"),  # where it would be but for the cache below
        **inner,
        # Measurements and calibrations of a card that does not compute must not be taken for a real one's of its name.
        "XDG_CACHE_HOME": str(built.parent / "cache"),
        "LD_PRELOAD": before("LD_PRELOAD", built / LIBRARY),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", built / "lib"),
        "PATH": before("PATH", built / "bin"),
        "PYTHONPATH": before("PYTHONPATH", HERE / "startup"),
        "FAKE_CUDA_NAME": card.name,
        "FAKE_CUDA_MIB": str(round(card.gib * 1024)),
        "FAKE_CUDA_CONTEXT_MIB": str(card.context_mib),
        "FAKE_CUDA_BOARD": str(board),
    }


def _run(command: Sequence[str], inner: Mapping[str, str]) -> int:
    children: list[subprocess.Popen[bytes]] = []
    wanted: list[int] = []

    def end(number: int, _: object) -> None:
        """What ends this one is to end the command, also while it is being started."""
        wanted.append(number)
        for child in children:
            child.send_signal(number)

    # Ctrl-C reaches the command by itself, and what it answers is waited for (SIG_IGN would be inherited by it).
    handlers = {signal.SIGTERM: end, signal.SIGINT: lambda *_: None}
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        children.append(subprocess.Popen(command, env=inner))
        for number in wanted:
            children[0].send_signal(number)
        code = children[0].wait()
    except OSError as error:
        print(f"fake_cuda: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code  # as a shell tells of a signal
