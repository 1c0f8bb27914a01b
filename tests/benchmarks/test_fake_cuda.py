"""CUDA without a card: what is refused, the environment it makes, and, with a CUDA build of PyTorch, a step in it."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.fake_cuda import board, library, run
from benchmarks.fake_cuda.library import FakeCudaError

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

# Run on the fake card: a fused step of AdamW over 4 MiB of weights, then more than a hundredth of the card.
PROGRAM = """
import json, subprocess, torch

weight = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
optimizer = torch.optim.AdamW([weight], fused=True)
weight.sum().backward()
optimizer.step()
found = {
    "name": torch.cuda.get_device_name(0),
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    "allocated": torch.cuda.memory_allocated(),
    "reserved": torch.cuda.memory_reserved(),
    "free_and_total": torch.cuda.mem_get_info(),
    "uuid": str(torch.cuda.get_device_properties(0).uuid),
    "smi": int(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout),
}
torch.cuda.set_per_process_memory_fraction(0.01)
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch seems to be built with CUDA 13, on a machine without a card."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def packages(root: Path, **headers: str) -> Path:
    """A made-up folder of packages with headers of CUDA, each in the package that is named."""
    folders = {"nvidia": "nvidia/cu13/include", "triton": "triton/backends/nvidia/include"}
    for package, names in headers.items():
        for name in names.split():
            header = root / folders[package] / name
            header.parent.mkdir(parents=True, exist_ok=True)
            header.touch()
    return root


def test_options_describe_the_card_and_all_after_the_dashes_is_the_command() -> None:
    assert run.parsed(["--", "program", "--gib", "1", "--", "x"]) == (
        run.Card(),
        ["program", "--gib", "1", "--", "x"],
    )
    card, command = run.parsed(
        ["--name", "Card", "--gib", "23.5", "--context-mib", "300", "--", "program"]
    )
    assert (card, command) == (run.Card("Card", 23.5, 300), ["program"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["program"],
        ["--"],
        *([option, value, "--", "x"] for option, value in [("--gib", "0"), ("--gib", "nan")]),
    ],
    ids=" ".join,
)
def test_no_command_and_no_size_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run.main(arguments)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_build_without_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert run.main(["--", "echo", "it ran"]) == 2
    out, err = capfd.readouterr()
    assert "without CUDA" in err and len(err.splitlines()) == 1
    assert "it ran" not in out


def test_where_there_is_a_card_it_is_to_be_used(
    cuda_build: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card")
    assert run.main(["--", "true"]) == 2
    assert "There is a card already, Some Card" in capsys.readouterr().err


def test_another_cuda_is_refused(
    cuda_build: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert run.main(["--", "true"]) == 2
    assert "CUDA 12.8" in capsys.readouterr().err


@pytest.mark.parametrize(("there", "missing"), [((), "g++"), (("g++",), "nm")])
def test_a_missing_tool_is_named(
    there: tuple[str, ...],
    missing: str,
    cuda_build: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.main(["--", "true"]) == 2
    assert f"{missing} is not installed" in capsys.readouterr().err


def test_a_path_that_the_loader_would_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    with pytest.raises(FakeCudaError, match="XDG_CACHE_HOME"):
        library.build()


def test_headers_are_taken_from_all_packages_that_have_some(tmp_path: Path) -> None:
    lacks_crt = packages(tmp_path / "one", nvidia="cuda.h cuda_runtime_api.h")
    with pytest.raises(FakeCudaError, match=r"crt/host_defines\.h"):
        library.header_folders([tmp_path / "nothing", lacks_crt])
    other = packages(tmp_path / "other", triton="cuda.h crt/host_defines.h")
    assert library.header_folders([lacks_crt, tmp_path / "nothing", other]) == [
        lacks_crt / "nvidia/cu13/include",
        other / "triton/backends/nvidia/include",
    ]
    with pytest.raises(FakeCudaError, match=r"cuda_runtime_api\.h"):
        library.header_folders([other])


def test_cublas_functions_are_read_from_nm_and_made_to_succeed() -> None:
    symbols = (
        "                 U cublasSgemm_v2@libcublas.so.13\n"
        "                 U cublasLtMatmul@libcublasLt.so.13\n"
        "                 U cudaMalloc@libcudart.so.13\n\n"
        "libtorch_cuda_linalg.so:\n"
        "                 U cublasSgemm_v2\n"
    )
    functions = library.cublas_functions(symbols)
    assert functions == ["cublasLtMatmul", "cublasSgemm_v2"]
    first, second = library.stubs(functions).splitlines()
    assert "weak" in first and first.endswith("int cublasLtMatmul() { return 0; }")
    assert second.endswith("int cublasSgemm_v2() { return 0; }")


def test_a_compiler_that_fails_is_told_of_by_its_error(tmp_path: Path) -> None:
    with pytest.raises(
        FakeCudaError, match=r"sh could not build the fake CUDA: x\.cpp: error: no such thing"
    ):
        library._output(
            [
                "sh",
                "-c",
                "echo note >&2; echo 'x.cpp: error: no such thing' >&2; echo end >&2; exit 1",
            ]
        )


def test_the_environment_adds_to_paths_and_describes_the_card() -> None:
    outer = {
        "PATH": "/usr/bin",
        "LD_PRELOAD": "/lib/other.so",
        "CUDA_VISIBLE_DEVICES": "",
        "KEPT": "as it is",
    }
    outer["XDG_CACHE_HOME"] = "/cache"
    inner = run.environment(
        outer, run.Card("Card", 23.5, 300), Path("/place/built"), Path("/fresh/board")
    )
    assert inner == {
        "KEPT": "as it is",
        "XDG_CACHE_HOME": "/place/cache",
        "HF_HOME": "/cache/huggingface",
        "PATH": "/place/built/bin:/usr/bin",
        "LD_PRELOAD": "/place/built/libfakecuda.so:/lib/other.so",
        "LD_LIBRARY_PATH": "/place/built/lib",
        "PYTHONPATH": str(ROOT / "benchmarks" / "fake_cuda" / "startup"),
        "FAKE_CUDA_NAME": "Card",
        "FAKE_CUDA_MIB": "24064",
        "FAKE_CUDA_CONTEXT_MIB": "300",
        "FAKE_CUDA_BOARD": "/fresh/board",
    }
    assert outer["CUDA_VISIBLE_DEVICES"] == ""
    inner = run.environment(
        {"HF_HOME": "/models"}, run.Card(), Path("/place/built"), Path("/fresh/board")
    )
    assert inner["HF_HOME"] == "/models"


@pytest.mark.parametrize(
    ("code", "answer"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)
def test_the_commands_exit_code_is_the_answer(code: str, answer: int) -> None:
    former = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert run._run([sys.executable, "-c", code], os.environ) == answer
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former


def test_ending_it_ends_the_command() -> None:
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(100)"
    assert run._run([sys.executable, "-c", code], os.environ) == 128 + signal.SIGTERM


def test_a_command_that_is_not_there_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert run._run(["no-such-command-anywhere"], os.environ) == 127
    assert "no-such-command-anywhere cannot be run" in capsys.readouterr().err


def test_nvidia_smi_adds_up_what_living_processes_hold(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    slots = [(os.getpid(), 700 * MIB), (gone.pid, 5 * MIB), (0, 3 * MIB), (os.getppid(), 20 * MIB)]
    path = tmp_path / "board"
    assert board.used_bytes(path) == 0
    path.write_bytes(b"".join(struct.pack("i4xQ", *slot) for slot in slots))
    assert board.used_bytes(path) == 720 * MIB

    def answer(*asked: str) -> str:
        command = [sys.executable, "-I", "-S", board.__file__, *asked]
        environment = {**os.environ, "FAKE_CUDA_BOARD": str(path)}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert answer() == "720\n"
    assert (
        answer("--query-gpu=uuid,memory.used") == "GPU-00000000-0000-0000-0000-000000000000, 720\n"
    )


def test_every_python_that_starts_there_turns_off_attention_by_cudnn() -> None:
    code = "import torch; print(torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())"
    environment = {**os.environ, "PYTHONPATH": str(library.HERE / "startup")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False True\n"


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch is built without CUDA")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_step_runs_and_memory_is_counted_as_on_a_card() -> None:
    options = ["--name", "Some Card", "--gib", "40", "--context-mib", "300"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.fake_cuda",
        *options,
        "--",
        sys.executable,
        "-c",
        PROGRAM,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["name"], found["cudnn"]) == ("Some Card", False)
    # Weights, their gradients and AdamW's two moments of 4 MiB each, and its step in the smallest piece of 512 bytes.
    assert found["allocated"] == 4 * 4 * MIB + 512
    # In segments of 20 MiB for what is over 1 MiB, and of 2 MiB for the rest.
    assert found["reserved"] == 22 * MIB
    total = 40 * 1024 * MIB
    assert found["free_and_total"] == [total - found["reserved"] - 300 * MIB, total]
    assert found["smi"] == 300 + 22
    assert found["uuid"] == "00000000-0000-0000-0000-000000000000"  # as nvidia-smi says there
    assert "out of memory" in found["refused"] and "409.60 MiB allowed" in found["refused"]
