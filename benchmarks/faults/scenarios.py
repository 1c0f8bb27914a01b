"""What faults strike: a search, a training, and a training on two ranks, each resumed afterwards, and what must then
be true; and files of finished ones that are damaged before a command reads them.
"""

import functools
import importlib
import json
import pickle
import random
import re
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from benchmarks.faults import faults
from benchmarks.faults.data_files import write_data
from benchmarks.faults.falsified import falsify
from benchmarks.faults.faults import AROUND, IN_PROCESS, Fault
from benchmarks.faults.tries import Ended, Tries

Weights = dict[str, np.ndarray[Any, Any]]
WORKLOAD = """
import torch
from torch import nn
from autofit import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48)) for _ in range(3))
        self.out = nn.Linear(48, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)

def batch(n):
    return {"x": torch.ones(n, 48), "y": torch.zeros(n, dtype=torch.long)}

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])

def make():
    return Workload(model=Net, batch=batch, loss=loss, effective_batch_size=8)
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
}
LLAMA |= {
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LLAMA |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
RESULT: dict[str, Any] = {
    "autofit": 1,
    "model": "llama",
    "workload": {"task": "causal-lm", "sequence_length": 16, "effective_batch_size": 4},
    "source": {"kind": "directory", "path": "llama"},
    "hardware": {"device": "cpu"},
    "config": {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "precision": "fp32"},
}
_TOGETHER = {"data_parallel": "fsdp", "data_parallel_shard": 2, "gradient_accumulation_steps": 1}
_SETTINGS = ("precision=fp32", "optimizer=adamw", "attention=sdpa")
_ROUNDING = 1e-7  # a smaller micro-batch adds up in another order
_LINE = re.compile(rb'(\{"op_code":.*),"crc":"([0-9a-f]{8})"\}')
_KNOWN = re.compile(
    r"\.lock|journal\.log(\.damaged(-\d+)?)?|probes|exports|(result|report)\.\w+|train\.py"
)


class Scenario(ABC):
    """A command that is struck by a fault, and goes on."""

    name: str
    depths: tuple[int, ...]  # of the processes that are struck
    computing: int  # the depth of those that take steps
    every = 1  # one in so many batches: what takes long is tried less

    def __init__(self, tries: Tries) -> None:
        self.tries, self.tried = tries, 0  # faults whose moment came
        self.start = tries.sandbox.scratch / f"start-{self.name}"
        self.prepare(tries.fresh())
        shutil.copytree(tries.folder, self.start, symlinks=True)

    def made(self) -> Weights:
        """What must be the same each time."""
        return {}

    @functools.cached_property
    def whole(self) -> Ended:
        """The command without a fault."""
        ended = self.begin(None)
        assert ended.code == 0 and not ended.broken, f"{self.name}: {ended}"
        assert all(map(ended.events.__getitem__, self.depths)), (
            f"{self.name}: not all of it can be struck: {ended}"
        )
        self.weights = self.made()
        return ended

    @abstractmethod
    def prepare(self, work: Path) -> None:
        """Write what the command needs."""

    @abstractmethod
    def arguments(self, *, again: bool) -> list[str]:
        """The command, also `again` after a fault."""

    @abstractmethod
    def lost(self, struck: Ended, went_on: Ended, fault: Fault) -> list[str]:
        """What is lost that was there."""

    def begin(self, fault: Fault | None) -> Ended:
        """The command from its start; one in three with nothing in the cache."""
        self.tries.fresh(self.start)
        if fault and fault.draw % 3 == 0:
            faults.delete(self.tries.folder / "cache")
        strike = functools.partial(self.strike, fault) if fault else None
        return self.tries.command(self.arguments(again=False), fault, strike)

    def draw(self, rng: random.Random) -> Fault:
        """A fault of this scenario."""
        kind, depth = rng.choice([each for each in self.possible() if self.whole.events[each[1]]])
        delay = rng.choice((0.0, 0.0, rng.uniform(0, 0.3)))
        return Fault(
            kind, depth, rng.randrange(self.whole.events[depth]), delay, rng.randrange(2**31)
        )

    def possible(self) -> list[tuple[str, int]]:
        """What may strike how deep; a kind as often as any other."""
        deep = dict.fromkeys(IN_PROCESS, self.depths) | dict.fromkeys((*AROUND, "interrupt"), (0,))
        # a command waits for the others
        deep |= {"hang": self.depths[1:], "device memory": (self.computing,)}
        deep |= {"orphan": self.depths[1:2]}
        deep |= {} if self.tries.sandbox.private else {"disk full": ()}
        most = max(map(len, deep.values()))
        return [
            (kind, depth) for kind, each in deep.items() if each for depth in (each * most)[:most]
        ]

    def strike(self, fault: Fault) -> None:
        """What strikes all processes of the try."""
        folder, rng = self.tries.folder, random.Random(fault.draw)
        if fault.kind == "disk full":
            self.tries.sandbox.fill()
        elif fault.kind == "clock back":
            faults.clock_back()
        elif fault.kind == "deleted":
            faults.delete(
                folder
                / rng.choice(
                    ("work/run", "work/run", "cache", "tmp", "work/run/probes", "work/out")
                )
            )
        elif files := [each for each in self.damageable(folder) if each.stat().st_size]:
            faults.flip(rng.choice(files), fault.draw)

    def damageable(self, folder: Path) -> list[Path]:
        """The files that are read back; not tokens that are being written, before their checksum is taken."""
        kept = (folder / "work" / "run", folder / "cache", folder / "work" / "out")
        unfinished = set((folder / "cache" / "autofit" / "data").glob("*.part/*"))
        files = {each for top in kept for each in top.rglob("*") if each.is_file()}
        return sorted(files - unfinished)

    def broken_by(self, fault: Fault) -> list[str]:
        """What a fault breaks, in the command and in going on after it."""
        _ = self.whole
        struck = self.begin(fault)
        self.tried += faults.there()
        broken = [f"struck: {each}" for each in struck.broken]
        again = self.tries.command(self.arguments(again=True))
        broken += [f"then: {each}" for each in again.broken]
        if again.code != 0:
            broken.append(f"then: exit code {again.code}: {again.err[-300:]}")
        return broken + self.lost(struck, again, fault)


class Search(Scenario):
    """A search of four trials."""

    name, depths, computing = "search", (0, 1, 2, 3), 2
    more: tuple[str, ...] = ("--set", "micro_batch_size=4,8")

    def prepare(self, work: Path) -> None:
        """With what an earlier search kept of the machine and of the space: half of the time."""
        (work / "mine.py").write_text(WORKLOAD)
        ended = self.tries.command(searching(work / "run", "--no-store", *self.more))
        assert ended.code == 0, ended
        shutil.rmtree(work / "run")

    def arguments(self, *, again: bool) -> list[str]:
        run = self.run if again else self.tries.folder / "work" / "run"
        resume = ["--resume"] if again and (run / "journal.log").exists() else []
        return searching(run, *resume, *self.more)

    @property
    def run(self) -> Path:
        """Where the measurements are: the last words of a search whose directory was deleted name another place."""
        said = self.tries.printed[1].read_text(errors="replace")
        told = re.findall(r"--resume\s+--out\s+(\S+?)\.?$", said, re.MULTILINE)
        return Path(told[-1]) if told else self.tries.folder / "work" / "run"

    def begin(self, fault: Fault | None) -> Ended:
        ended = super().begin(fault)
        self.held = set(measured(self.run / "journal.log"))
        return ended

    def lost(self, struck: Ended, went_on: Ended, fault: Fault) -> list[str]:
        """Every measurement that was on the disk, or that was told to be done, and what did not belong there."""
        if went_on.code != 0:
            return []
        trials = json.loads(went_on.out)["trials"]
        broken = [f"lost: {each}" for each in self.held - {_key(trial) for trial in trials}]
        told = len(re.findall(r"^probe \d+ of", struck.err, re.MULTILINE))
        if (
            fault.kind != "flipped"
            and not (fault.kind == "deleted" and struck.code != 0)
            and len(self.held) < told
        ):
            broken.append(f"lost: {told} probes were told of, {len(self.held)} were kept")
        names = [each.name for each in (self.tries.folder / "work" / "run").glob("*")]
        return broken + [
            f"left in the run directory: {name}" for name in names if not _KNOWN.fullmatch(name)
        ]


class Gang(Search):
    """The same on two ranks, of two trials."""

    name, depths = "gang", (0, 1, 2)
    more = ("--set", "micro_batch_size=2,4", "--devices", "2", "--trials", "2")
    every = 3


def searching(run: Path, *more: str) -> list[str]:
    """A small search of four trials."""
    words = [word for setting in _SETTINGS for word in ("--set", setting)]
    words = ["search", "--model", "mine.py:make", "--device", "cpu", "--mem", "1", *words]
    return [*words, "--trials", "4", "--out", str(run), "--json", *more]


def measured(journal: Path) -> Iterator[tuple[Any, ...]]:
    """The measurements that a journal holds, read without autofit."""
    for line in journal.read_bytes().splitlines() if journal.exists() else ():
        match = _LINE.fullmatch(line)
        is_whole = match is not None and int(match[2], 16) == zlib.crc32(match[1])
        if is_whole and (found := json.loads(line).get("user_attr", {}).get("measurement")):
            yield _key(found)


def _key(trial: dict[str, Any]) -> tuple[Any, ...]:
    return trial["number"], trial["outcome"], trial["seconds"]


class Training(Scenario):
    """A training of eight steps with four checkpoints."""

    name, depths, computing = "training", (0,), 0
    config: Mapping[str, Any] = MappingProxyType({})
    more: tuple[str, ...] = ()

    def prepare(self, work: Path) -> None:
        (work / "llama").mkdir()
        (work / "llama" / "config.json").write_text(json.dumps(LLAMA))
        (work / "result.yaml").write_text(
            yaml.safe_dump({**RESULT, "config": {**RESULT["config"], **self.config}})
        )
        (work / "corpus.txt").write_text("a b c d e f g h i j k l m n o p\n" * 60)

    def arguments(self, *, again: bool) -> list[str]:
        words = [
            "train",
            "result.yaml",
            "--data",
            "corpus.txt",
            "--from-scratch",
            "--steps",
            "8",
            "--output",
            "out",
        ]
        kept = list((self.tries.folder / "work" / "out" / "checkpoints").glob("step-*"))
        resume = ["--resume"] if again and kept else []
        return [*words, "--checkpoint-every", "2", "--keep-last", "3", *self.more, *resume]

    def made(self) -> Weights:
        path = self.tries.folder / "work" / "out" / "model" / "model.safetensors"
        return load_file(path) if path.exists() else {}

    def lost(self, struck: Ended, went_on: Ended, fault: Fault) -> list[str]:
        """The weights are those of the whole one, bit for bit, and no half checkpoint stays."""
        if went_on.code != 0:
            return []
        out = self.tries.folder / "work" / "out"
        broken = [
            f"left: {each.relative_to(out)}" for each in out.rglob(".*") if each.name != ".lock"
        ]
        return broken + self.differ(_ROUNDING if fault.kind.endswith("memory") else 0.0)

    def differ(self, most: float = 0.0) -> list[str]:
        """Whether the weights are others than those of the whole one by more than `most`."""
        made = self.made()
        off = [
            np.abs(made[name] - each).max() for name, each in self.weights.items() if name in made
        ]
        is_same = made.keys() == self.weights.keys() and max(off) <= most
        return [] if is_same else [f"the weights are others, by {max(off, default=-1)}"]


class Ranks(Training):
    """The same on two ranks."""

    name, depths, computing = "ranks", (0, 1, 2), 2
    config = _TOGETHER
    more = ("--devices", "2")

    def possible(self) -> list[tuple[str, int]]:
        """Ranks hang; what started them cannot be told from one that waits for them."""
        return [each for each in super().possible() if each not in (("hang", 1), ("stop", 1))]


class Stages(Ranks):
    """The same on two stages of a pipeline."""

    name = "stages"
    config = MappingProxyType({"pipeline_parallel": 2})


class Chunks(Ranks):
    """The same on two stages of two rows of blocks each."""

    name = "chunks"
    config = MappingProxyType({"pipeline_parallel": 2, "pipeline_schedule": "interleaved"})


def hostile(canary: Path, rng: random.Random) -> bytes:
    """What would touch the canary if it were run: a pickle, YAML with a tag of Python's, a saved tensor."""
    command = f"touch {canary}"
    payload = pickle.dumps(_Runs(command), protocol=2)
    tagged = f'autofit: 1\nmodel: !!python/object/apply:os.system ["{command}"]\nworkload: {{}}\nconfig: {{}}\n'
    return rng.choice(
        (payload, tagged.encode(), f'{{"digest": "x", "data": "$({command})"}}'.encode())
    )


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module("os").system, (self.command,)


class Files(Training):
    """Files of a finished search and of a training, damaged, replaced or falsified before a command reads them."""

    name = "files"

    def prepare(self, work: Path) -> None:
        super().prepare(work)
        (work / "mine.py").write_text(WORKLOAD)
        for arguments in (searching(work / "run"), self.arguments(again=False)):
            ended = self.tries.command(arguments)
            assert ended.code == 0, ended

    def begin(self, fault: Fault | None) -> Ended:
        """The training goes on, after the fault."""
        self.tries.fresh(self.start)
        return self.tries.command(self._training)

    @property
    def _training(self) -> list[str]:
        return [word if word != "8" else "10" for word in self.arguments(again=True)]

    def draw(self, rng: random.Random) -> Fault:
        return Fault("flipped", 0, 0, draw=rng.randrange(2**31))

    def broken_by(self, fault: Fault) -> list[str]:
        _ = self.whole
        work, rng = self.tries.fresh(self.start), random.Random(fault.draw)
        readers = self._readers(work)
        folder, command = rng.choice(
            [(folder, each) for folder, commands in readers for each in commands]
        )
        file = rng.choice([each for each in sorted((folder, *folder.rglob("*"))) if each.is_file()])
        how = rng.random()
        if how < 0.2:
            file.write_bytes(hostile(self.tries.canary, rng))
        elif how < 0.6:
            falsify(file, rng)
        else:
            faults.flip(file, fault.draw)
        ended = self.tries.command(command)
        self.tried += 1
        broken = [
            f"{command[0]} with {file.relative_to(self.tries.folder)}: {each}"
            for each in ended.broken
        ]
        if ended.code not in (0, 2) or (ended.code and folder.name == "cache"):
            broken.append(
                f"{command[0]} with {file.name}: exit code {ended.code}: {ended.err[-200:]}"
            )
        if command == self._training and ended.code == 0 and folder.name != "result.yaml":
            broken += [
                f"{each} with {file.relative_to(self.tries.folder)}" for each in self.differ()
            ]
        return broken

    def _readers(self, work: Path) -> list[tuple[Path, list[list[str]]]]:
        """What is read, by which commands."""
        run, result = str(work / "run"), "run/result.yaml"
        resumed, anew = searching(work / "run", "--resume"), searching(work / "run2")
        estimate = [
            "estimate",
            "--model",
            "mine.py:make",
            "--device",
            "cpu",
            "--mem",
            "1",
            "--json",
        ]
        export = ["export", "result.yaml", "--to", "trl"]
        return [
            (work / "run", [resumed, resumed, ["report", run], ["report", run, "--format", "md"]]),
            (work / "run" / "journal.log", [resumed, resumed]),
            (
                work / result,
                [[*estimate, "--config", result], ["export", result, "--to", "accelerate"]],
            ),
            (work / "result.yaml", [self._training, export]),
            (work / "out" / "checkpoints", [self._training] * 4),
            (work / "out", [self._training]),
            (work.parent / "cache", [self._training, anew, anew, ["doctor", "--device", "cpu"]]),
        ]


class Data(Training):
    """Trainings on data files that are drawn."""

    name = "data"

    def draw(self, rng: random.Random) -> Fault:
        return Fault("flipped", 0, 0, draw=rng.randrange(2**31))

    def broken_by(self, fault: Fault) -> list[str]:
        _ = self.whole
        work = self.tries.fresh(self.start)
        path = write_data(work, random.Random(fault.draw))
        words = [
            path.name if word == "corpus.txt" else word for word in self.arguments(again=False)
        ]
        ended = self.tries.command(words)
        self.tried += 1
        broken = [f"{path.name}: {each}" for each in ended.broken]
        if ended.code not in (0, 2):
            broken.append(f"{path.name}: exit code {ended.code}: {ended.err[-300:]}")
        return broken


class Together(Scenario):
    """Two of the same command at once, in the same place or in two: nothing is lost, and nobody waits forever."""

    def draw(self, rng: random.Random) -> Fault:
        return Fault(
            "flipped", 0, 0, rng.choice((0.0, rng.uniform(0.0, 2.0))), rng.randrange(2**31)
        )

    def broken_by(self, fault: Fault) -> list[str]:
        _ = self.whole
        self.tries.fresh(self.start)
        first = self.arguments(again=False)
        second = first if fault.draw % 2 else self.elsewhere(first)
        codes = self.tries.both(first, second, fault.delay)
        self.tried += 1
        allowed = ((0, 0), (0, 2), (2, 0)) if second == first else ((0, 0),)
        broken = [] if codes in allowed else [f"two at once ended with {codes}"]
        return broken + self.differ()

    def elsewhere(self, arguments: list[str]) -> list[str]:
        """The same command, written to another place."""
        option = "--out" if "--out" in arguments else "--output"
        place = arguments.index(option) + 1
        return [*arguments[:place], f"{arguments[place]}2", *arguments[place + 1 :]]

    def differ(self) -> list[str]:
        """What is not as after one command alone."""
        return []


class Searches(Together, Search):
    """Two searches at once."""

    name = "searches"


class Trainings(Together, Training):
    """Two trainings at once."""

    name = "trainings"

    def differ(self) -> list[str]:
        return Training.differ(self)


class Pipelines(Training):
    """Commands whose reader goes before all is said, as `autofit ... | head -1` has it."""

    name = "pipelines"

    def draw(self, rng: random.Random) -> Fault:
        return Fault("flipped", 0, 0, draw=rng.randrange(2**31))

    def broken_by(self, fault: Fault) -> list[str]:
        _ = self.whole
        self.tries.fresh(self.start)
        rng = random.Random(fault.draw)
        commands = [
            ["spaces"],
            ["models", "--json"],
            ["doctor", "--device", "cpu", "--json"],
            ["export", "result.yaml", "--to", "trl", "--output", "/dev/stdout"],
            ["explain", "result.yaml"],
            self.arguments(again=False),
        ]
        command = rng.choice(commands)
        code, said = self.tries.piped(command, rng.choice((0, 1, 100, 4096)))
        self.tried += 1
        broken = [] if code in (0, 2) else [f"{command[0]} into a pipe: exit code {code}"]
        if "Traceback" in said:
            broken.append(f"{command[0]} into a pipe says {said[-300:]!r}")
        return broken


SCENARIOS: tuple[type[Scenario], ...] = (
    *(Search, Gang, Training, Ranks, Stages, Chunks, Files),
    *(Data, Searches, Trainings, Pipelines),
)
