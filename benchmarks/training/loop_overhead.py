"""What autofit's loop costs against the shortest hand-written one, what it reaches of the probe's figures, and whether
cutting a batch changes its gradient. `python -m benchmarks.loop_overhead [--smoke] [--out FILE]`; minutes on a CPU.

Steps of both loops alternate in one process, a few at a time and each first in turn, so that what disturbs the machine
disturbs both; the figures are medians of pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autofit
from autofit.core.errors import NothingFitsError
from autofit.core.knobs import SETTABLE
from autofit.core.measurement import Measurement
from autofit.core.workload import Hyperparameters
from autofit.distributed.group import devices_of_group
from autofit.distributed.launcher import on_ranks
from autofit.hardware.device import detect
from autofit.models import resolve
from autofit.probe import LocalExecutor
from autofit.training.build import build
from autofit.training.local_batch import local_batch
from autofit.training.loop import train
from autofit.training.step import accumulate
from autofit.training.workload import workload_from
from benchmarks.gpu.cases import TINY
from benchmarks.run_apart import Ran, command, script

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "alice.txt"
LR = 1e-4
_RUN_SECONDS = 600.0  # at most
SMALL = {  # a space of micro-batches alone, which is predicted at once
    "optimizer": "adamw",
    "optimizer_in_backward": False,
    "optimizer_offload": "none",
    "precision": "fp32",
    "compile": "none",
    "activation_checkpointing": "none",
    "activation_offload": "none",
    "attention": "sdpa",
    "loss": "standard",
}
ALLOWED_SHARE, ALLOWED_SECONDS, LONG_STEP = 0.01, 0.3e-3, 50e-3
ALLOWED_SHARE_OF_RANKS = 0.02
FSDP = {"data_parallel": "fsdp"}


@dataclass(frozen=True)
class Overhead:
    """Median seconds of a step by hand and by the loop, and the median of their differences, pair by pair."""

    name: str
    by_hand: float
    by_loop: float
    difference: float

    ranks: int = 1

    @property
    def reached(self) -> bool:
        """At most 1 % of a step of 50 ms or more, 2 % on several ranks, at most 0.3 ms of a shorter one."""
        share = ALLOWED_SHARE if self.ranks == 1 else ALLOWED_SHARE_OF_RANKS
        return self.difference <= (
            share * self.by_hand if self.by_hand >= LONG_STEP else ALLOWED_SECONDS
        )


class Block(nn.Module):
    """Two linear layers of a residual network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Network(nn.Module):
    """Residual blocks of some width and depth, and a classifier."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of (features, classes)."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(samples: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random features and classes."""
    return torch.randn(samples, width), torch.randint(10, (samples,))


def overhead(
    name: str,
    network: Callable[[], Network],
    batch: Any,
    *,
    micro: int,
    rounds: int,
    device_type: str | None = None,
) -> Overhead:
    """Alternate chunks of steps of the two loops; on each rank, where several train."""
    device = detect(device_type).of_several(*devices_of_group())
    config = {"micro_batch_size": micro, "optimizer": "adamw"} | (FSDP if device.world > 1 else {})
    model = network()
    workload = workload_from(model, [batch], classify)
    setup = build(workload, config, device, model=model, hyperparameters=Hyperparameters(lr=LR))
    own = local_batch(setup, batch).batch
    hand = by_hand(divided(network().to(setup.device)), own, micro=micro, device=setup.device)
    steps = 5
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 2):
        seconds = {}
        for loop in ("hand", "loop") if number % 2 else ("loop", "hand"):
            start = time.perf_counter()
            if loop == "loop":
                train(setup, [batch] * steps, steps=steps)
            else:
                for _ in range(steps):
                    next(hand)
            seconds[loop] = (time.perf_counter() - start) / steps
        pairs.append((seconds["hand"], seconds["loop"]))
        if number == 1:
            pairs.clear()  # warm-up
    return Overhead(
        name,
        by_hand=statistics.median(pair[0] for pair in pairs),
        by_loop=statistics.median(pair[1] for pair in pairs),
        difference=statistics.median(pair[1] - pair[0] for pair in pairs),
        ranks=device.world,
    )


def divided(model: Network) -> Network:
    """The model under FSDP2, where several ranks train."""
    if dist.is_initialized():
        # by default on a card, where there is one
        mesh = init_device_mesh(kind_of_ranks(), (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def kind_of_ranks() -> str:
    """What two ranks train on: a card each, or else the processor."""
    return "cuda" if torch.cuda.device_count() > 1 else "cpu"


def of_ranks(_: object, width: int, samples: int, rounds: int, device_type: str) -> Overhead:
    """What one of several ranks sees, with a micro-batch to each."""
    torch.manual_seed(0)
    batch, micro = batch_of(samples, width), samples // dist.get_world_size()
    name = f"a long step of {dist.get_world_size()} ranks (FSDP2)"
    return overhead(
        name, lambda: Network(width, 4), batch, micro=micro, rounds=rounds, device_type=device_type
    )


def by_hand(model: nn.Module, batch: Any, *, micro: int, device: torch.device) -> Iterator[float]:
    """The shortest loop with the same config: the loss is read once a step, as everybody logs it."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors}], lr=LR, weight_decay=0.0, fused=True
    )
    samples = len(batch[0])
    while True:
        total = torch.zeros((), device=device)
        for start in range(0, samples, micro):
            part = tuple(tensor[start : start + micro].to(device) for tensor in batch)
            loss = classify(model, part) * (len(part[0]) / samples)
            loss.backward()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(
                total, op=dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM
            )
        optimizer.step()
        optimizer.zero_grad()
        yield float(total)


@dataclass(frozen=True)
class Reached:
    """What a way of training reaches of what the probe measures beside it: tokens a second and peak bytes."""

    name: str
    speed: float
    peak: float


def reached(*, smoke: bool) -> list[Reached]:
    """Search; then, in turn, probe the found config again, run its train.py, and train it by `autofit train`."""
    shape = {"seq_len": 32 if smoke else 128, "effective_batch": 4 if smoke else 16}
    with tempfile.TemporaryDirectory() as name, LocalExecutor() as executor:
        folder = Path(name)
        model, fixed, trials = (
            (str(TINY), SMALL, 2) if smoke else ("tiny-llama", {"optimizer": "adamw"}, 4)
        )
        found = _search(model, folder / "found", shape, fixed, trials=trials)
        train_py, result = (str(folder / "found" / file) for file in ("train.py", "result.yaml"))
        speeds: dict[str, list[float]] = {"train.py": [], "autofit train": []}
        for number in range(1 if smoke else 3):
            fixed = {knob: value for knob, value in found.config.items() if knob in SETTABLE}
            again = (
                found
                if smoke
                else _search(model, folder / f"probe-{number}", shape, fixed, trials=1)
            )
            probed = again.tokens_per_second
            assert probed, "tokens are what it counts"
            steps = 5 if smoke else 20
            options = ["--data", str(DATA), "--steps", str(steps), "--log-every", "1"]
            speeds["train.py"].append(
                _run(executor, script, train_py, options).tokens_per_second / probed
            )
            speeds["autofit train"].append(_train_speed(executor, folder, number, steps) / probed)
        assert found.peak_bytes, "what fits has a peak"
        short = ["--data", str(DATA), "--steps", "2"]
        peaks = {
            "train.py": _run(executor, script, train_py, short, "cpu").peak_bytes,
            "autofit train": _run(
                executor, command, ["train", result, "--from-scratch", *short], "cpu"
            ).peak_bytes,
        }
    return [
        Reached(way, statistics.median(ratios), (peaks[way] or 0) / found.peak_bytes.allocated)
        for way, ratios in speeds.items()
    ]


def _search(
    model: str, out: Path, shape: dict[str, int], fixed: dict[str, Any], *, trials: int
) -> Measurement:
    about: dict[str, Any] = {"device": "cpu", "mem": 4, "space": "full", "store": False, **shape}
    result = autofit.search(model, trials=trials, out=out, set=fixed, **about)
    if result.best is None:
        raise NothingFitsError("the benchmark needs a config that fits.")
    return result.best


def _train_speed(executor: LocalExecutor, folder: Path, number: int, steps: int) -> float:
    out = folder / f"trained-{number}"
    options = ["--data", str(DATA), "--steps", str(steps), "--output", str(out), "--quiet"]
    _run(
        executor,
        command,
        ["train", str(folder / "found" / "result.yaml"), "--from-scratch", *options],
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    length = yaml.safe_load((folder / "found" / "result.yaml").read_text())["workload"][
        "sequence_length"
    ]
    return statistics.median(row["samples"] * length / row["seconds"] for row in rows[2:])


def _run(executor: LocalExecutor, function: Callable[..., Ran], *arguments: Any) -> Ran:
    ran: Ran = executor.run(function, None, *arguments, log="run.log", timeout=_RUN_SECONDS)
    return ran


def cut_gradients(micro_batches: tuple[int, ...] = (1, 3, 4)) -> float:
    """The largest relative difference of a gradient from that of the unsplit batch: causal LM, uneven padding, fp32."""
    workload = resolve("tiny-llama", sequence_length=64, effective_batch_size=8)
    batch = workload.batch(8)
    lengths = torch.tensor([64, 3, 17, 40, 1, 64, 9, 33])
    batch["labels"] = batch["labels"].masked_fill(torch.arange(64) >= lengths.unsqueeze(1), -100)
    gradients: dict[int, torch.Tensor] = {}
    for micro in (8, *micro_batches):
        torch.manual_seed(0)
        setup = build(workload, {}, detect("cpu"), model=workload.model())
        setup.micro_batch_size = micro
        accumulate(setup, batch)
        gradients[micro] = torch.cat(
            [p.grad.flatten() for _, p in setup.trainable() if p.grad is not None]
        )
    whole = gradients.pop(8)
    return max(float((each - whole).norm() / whole.norm()) for each in gradients.values())


def overheads(*, smoke: bool) -> list[Overhead]:
    """Of short and long steps, whole and cut."""
    torch.manual_seed(0)
    rounds = 2 if smoke else 60
    small, large = batch_of(16, 32), batch_of(16 if smoke else 256, 32 if smoke else 512)
    wide, kind = 32 if smoke else 512, kind_of_ranks()
    return [
        overhead("a small step", lambda: Network(32, 2), small, micro=16, rounds=4 * rounds),
        overhead(
            "a small step of 4 micro-batches",
            lambda: Network(32, 2),
            small,
            micro=4,
            rounds=2 * rounds,
        ),
        overhead(
            "a long step", lambda: Network(wide, 4), large, micro=len(large[0]), rounds=rounds
        ),
        overhead(
            "a long step of 4 micro-batches",
            lambda: Network(wide, 4),
            large,
            micro=len(large[0]) // 4,
            rounds=rounds,
        ),
        # as much for each as above
        on_ranks(of_ranks, wide, 2 * len(large[0]), rounds, kind, count=2, device=kind),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes and few rounds: only whether it runs"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args(arguments)
    smoke = given.smoke
    rows = overheads(smoke=smoke)
    for row in rows:
        share = row.difference / row.by_hand
        verdict = "reached" if row.reached else "NOT reached"
        print(
            f"{row.name}: by hand {row.by_hand * 1e3:.3f} ms, by the loop {row.by_loop * 1e3:.3f} ms: "
            f"{row.difference * 1e3:+.3f} ms ({share:+.2%}): {verdict}"
        )
    difference = cut_gradients()
    print(
        f"gradients of a batch cut into micro-batches: {difference:.1e} relative to the unsplit one"
    )
    found = reached(smoke=smoke)
    for each in found:
        print(
            f"{each.name} reaches {each.speed:.1%} of the probe's tokens a second, {each.peak:.1%} of its peak"
        )
    if given.out:
        figures = {
            "overhead": [asdict(row) for row in rows],
            "cut_gradients": difference,
            "reached": [asdict(each) for each in found],
        }
        given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
