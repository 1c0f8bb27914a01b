"""Builds the fake CUDA once for each PyTorch and each state of its sources, and lays its stand-ins beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from autofit.core.files import cache_file, digest

HERE = Path(__file__).resolve().parent
LIBRARY = "libfakecuda.so"
# What programs load by name and ask for functions: empty libraries that lead to the one above.
STAND_INS = ("libcuda.so.1", "libnvidia-ml.so.1")
_HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
_HEADER_FOLDERS = ("nvidia/cu13/include", "triton/backends/nvidia/include")  # the first lacks crt/
_COMPILE = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden")


class FakeCudaError(Exception):
    """The fake CUDA cannot be had here; the text is one sentence for the user."""


def header_folders(roots: Iterable[str | Path]) -> list[Path]:
    """The folders under some roots of packages in which CUDA's headers are, in the order the compiler is to look.

    Raises:
        FakeCudaError: one of the headers is in none of them.
    """
    folders = [
        folder
        for root in roots
        for each in _HEADER_FOLDERS
        if (folder := Path(root) / each).is_dir()
    ]
    for header in _HEADERS:
        if not any((folder / header).is_file() for folder in folders):
            raise FakeCudaError(
                f"CUDA 13's {header} is in none of the installed packages; torch's CUDA build from PyPI brings it."
            )
    return folders


def cublas_functions(symbols: str) -> list[str]:
    """The functions of cuBLAS in what `nm` prints."""
    return sorted(set(re.findall(r"\bU (cublas\w+)", symbols)))


def stubs(functions: Sequence[str]) -> str:
    """C++ of functions that do nothing and succeed, each only where no other of its name is there."""
    weak = 'extern "C" __attribute__((visibility("default"), weak))'
    lines = [f"{weak} int {name}() {{ return 0; }}" for name in functions]
    return "\n".join([*lines, ""])


def build() -> Path:
    """The folder that holds the library, `lib` with its stand-ins and `bin` with nvidia-smi; made if it is not there.

    Raises:
        FakeCudaError: a compiler, nm or CUDA's headers are missing, or what they were given did not compile.
    """
    sources = [*sorted(HERE.glob("*.cpp")), HERE / "fake.h"]
    # The interpreter and the place of board.py are written into nvidia-smi.
    about = [
        torch.__version__,
        torch.__file__,
        sys.executable,
        str(HERE),
        *_COMPILE,
        Path(__file__).read_text(),
    ]
    place = cache_file(
        "fake-cuda", digest("\n".join([*about, *(source.read_text() for source in sources)]))
    )
    if re.search(r"[\s:;]", str(place)):
        raise FakeCudaError(
            f"{place} cannot be written into LD_PRELOAD: set XDG_CACHE_HOME to another folder."
        )
    if place.is_dir():
        return place
    for command, package in (("g++", "g++"), ("nm", "binutils")):
        if shutil.which(command) is None:
            raise FakeCudaError(
                f"{command} is not installed; it comes with the system's package {package}."
            )
    folders = header_folders(sys.path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        made = Path(temporary) / "made"
        _make(made, place, sources, folders)
        if not place.is_dir():
            try:
                made.rename(place)
            except OSError:
                if not place.is_dir():  # else another process was quicker, with the same
                    raise
    return place


def _make(made: Path, place: Path, sources: Sequence[Path], folders: Sequence[Path]) -> None:
    (made / "lib").mkdir(parents=True)
    (made / "bin").mkdir()
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cuda*.so"))
    rest = made / "cublas_stubs.cpp"
    rest.write_text(
        stubs(cublas_functions(_output(["nm", "-D", "--undefined-only", *map(str, libraries)])))
    )
    library = made / LIBRARY
    includes = [f"-I{folder}" for folder in folders]
    code = [*(str(source) for source in sources if source.suffix == ".cpp"), str(rest)]
    # Its name is the path where it will be, so that the stand-ins find it there and it is loaded but once.
    named = f"-Wl,-soname,{place / LIBRARY}"
    _output(["g++", *_COMPILE, named, *includes, *code, "-o", str(library), "-ldl"])
    for stand_in in STAND_INS:
        link = ["-Wl,--no-as-needed", f"-Wl,-soname,{stand_in}", str(library)]
        _output(
            [
                "g++",
                "-shared",
                "-x",
                "c++",
                "/dev/null",
                "-x",
                "none",
                *link,
                "-o",
                str(made / "lib" / stand_in),
            ]
        )
    smi = made / "bin" / "nvidia-smi"
    smi.write_text(
        f'#!/bin/sh\nLD_PRELOAD= exec "{sys.executable}" -I -S "{HERE / "board.py"}" "$@"\n'
    )
    smi.chmod(0o755)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        wrong = next((line for line in said if "error" in line), said[-1])
        raise FakeCudaError(f"{command[0]} could not build the fake CUDA: {wrong}")
    return done.stdout
