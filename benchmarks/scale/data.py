"""Data files of 10 MB, 100 MB and 1 GB: the memory that a training takes, and the seconds to its first step.

A file of each size is made for texts, chats and pairs, and a tiny model makes one step on it by
`autofit train`, in processes of its own. Their memory is sampled all together (proportional set
sizes: what they share counts once). The same training on a few rows shows what it takes by itself.
The tokenizer is that of bytes, whose own time is next to nothing: what is seen is what reading,
checking and keeping rows cost. Beside seconds of the clock stand those of the processors, which a busy
machine does not change. AUTOFIT_SCALE_SIZES="1000000 ..." and AUTOFIT_SCALE_KINDS="texts ..." name
others.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

SIZES = "10000000 100000000 1000000000"  # bytes
_SMALL = 100_000
_WORDS = 4000
_DISTINCT = 100  # rows, which are repeated
_MOST_GIB = 2.0  # above a training's own
_DECODER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_PAIRS = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 256,
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_ROLES = ("user", "assistant")
_MODELS: Mapping[str, tuple[dict[str, Any], str]] = {
    "texts": (_DECODER, "causal-lm"),
    "chats": (_DECODER, "causal-lm"),
    "pairs": (_PAIRS, "seq2seq"),
}


def main() -> dict[str, Any]:
    """Measure all kinds and sizes."""
    sizes = [int(size) for size in os.environ.get("AUTOFIT_SCALE_SIZES", SIZES).split()]
    kept: dict[str, Any] = {}
    for kind in os.environ.get("AUTOFIT_SCALE_KINDS", " ".join(_MODELS)).split():
        with tempfile.TemporaryDirectory(prefix="autofit-scale-") as temporary:
            folder = Path(temporary)
            result = _result(kind, folder)
            own = _trained(kind, _SMALL, result, folder)
            print(f"{kind}, a training's own: {_row(own)}", flush=True)
            kept[kind] = {"own": own}
            for size in sizes:
                found = _trained(kind, size, result, folder)
                found["gib_above_own"] = round(found["peak_gib"] - own["peak_gib"], 3)
                found["fits"] = found["gib_above_own"] <= _MOST_GIB
                print(f"{kind}, {size / 1e6:,.0f} MB: {_row(found)}", flush=True)
                kept[kind][str(size)] = found
    return kept


def _row(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _result(kind: str, folder: Path) -> Path:
    """A result that trains a tiny model on that kind of data."""
    config, task = _MODELS[kind]
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    saved = {
        "autofit": 1,
        "model": "model",
        "workload": {"task": task, "sequence_length": 256, "effective_batch_size": 8},
        "source": {"kind": "directory", "path": str(model)},
        "hardware": {"device": "cpu"},
        "config": {"micro_batch_size": 8},
    }
    path = folder / "result.yaml"
    path.write_text(yaml.safe_dump(saved))
    return path


def _trained(kind: str, size: int, result: Path, folder: Path) -> dict[str, Any]:
    """One step on a new file of so many bytes, and one when its tokens are kept already."""
    data = folder / f"{kind}.jsonl"
    rows = write_rows(data, kind, size)
    first = _step(result, data, folder)
    again = _step(result, data, folder)
    kept = sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file())
    shutil.rmtree(folder / "cache")
    data.unlink()
    return {
        "rows": rows,
        "peak_gib": first["peak_gib"],
        "first_step_s": first["seconds"],
        "cpu_s": first["cpu"],
        "again_s": again["seconds"],
        "again_cpu_s": again["cpu"],
        "again_peak_gib": again["peak_gib"],
        "kept_mb": round(kept / 1e6, 1),
    }


def _step(result: Path, data: Path, folder: Path) -> dict[str, float]:
    """The peak of memory, the seconds to the end of the first step, as metrics.jsonl says it, and those
    of processors to the end of all."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = folder / "out"
    command = [sys.executable, "-m", "autofit", "train", str(result), "--data", str(data)]
    command += ["--from-scratch", "--steps", "1", "--output", str(out)]
    log = folder / "log.txt"
    began = time.monotonic()
    seconds = 0.0
    peak = 0
    with log.open("w") as stream:
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        process = psutil.Popen(command, env=environment, stdout=stream, stderr=stream)
        while process.poll() is None:
            peak = max(peak, _memory(process))
            metrics = out / "metrics.jsonl"
            if not seconds and metrics.exists() and metrics.stat().st_size:
                seconds = time.monotonic() - began
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(log.read_text())
    shutil.rmtree(out)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "peak_gib": round(peak / 2**30, 3),
        "seconds": round(seconds, 1),
        "cpu": round(used, 1),
    }


def _memory(process: psutil.Process) -> int:
    """The bytes of a process and all below it, what they share counted once."""
    total = 0
    with contextlib.suppress(psutil.Error, OSError):
        for part in (process, *process.children(recursive=True)):
            total += part.memory_full_info().pss
    return total


def write_rows(path: Path, kind: str, size: int) -> int:
    """Write a file of about so many bytes; returns how many rows it has."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 10))) for _ in range(_WORDS)]

    def text(most: int) -> str:
        start = rng.randrange(_WORDS)
        return " ".join(words[start : start + rng.randint(5, most)])

    part = []
    for _ in range(_DISTINCT):
        row: Any = {"text": text(400)}
        if kind == "chats":
            row = {"messages": [{"role": role, "content": text(100)} for role in _ROLES]}
        elif kind == "pairs":
            row = {"source": text(200), "target": text(200)}
        part.append(f"{json.dumps(row)}\n")

    written = 0
    rows = 0
    with path.open("w") as file:
        while written < size:
            file.writelines(part)
            written += sum(map(len, part))
            rows += len(part)
    return rows
