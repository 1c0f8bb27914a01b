"""How each tool is run on what is exported for it: the lines that a user adds, and the tool's own command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autofit.core.config import Config
from autofit.core.layout import Layout
from autofit.export.importers.command_line import COMMAND
from autofit.export.importers.document import flat
from autofit.export.runs import run_of
from benchmarks.export_runs import SCRIPTS, STEPS, Stage, torchrun

# (..., the folder of the exported files) -> what python runs
Command = Callable[[Stage, Config, Path], list[str]]
_TRAINER = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
_LAUNCH = ["-m", "accelerate.commands.launch", "--config_file"]


def _added(path: Path, keys: dict[str, Any], section: str | None = None) -> None:
    """Keys that an export leaves to the user, or has a stand-in for."""
    data = yaml.safe_load(path.read_text())
    (data[section] if section else data).update(keys)
    path.write_text(yaml.safe_dump(data, sort_keys=False))


def _script(name: str, stage: Stage, config: Config, folder: Path) -> str:
    """A script of the user's, beside the exported files."""
    given = {name: config[name] for name in ("micro_batch_size", "gradient_accumulation_steps")}
    given |= {"weights": str(stage.weights), "tokens": str(stage.tokens), "steps": STEPS}
    (folder / "given.json").write_text(json.dumps(given))
    for each in ("samples.py", name):
        shutil.copy(SCRIPTS / each, folder)
    return str(folder / name)


def _by_run(tool: str, stage: Stage, folder: Path, **keys: Any) -> list[str]:
    """As `autofit tune` runs the tool on a file of it; `keys`: further ones of that file."""
    run = run_of(tool)
    exported = flat(yaml.safe_load((folder / run.file).read_text()))
    return run.prepare({**exported, **keys}, stage.of_tool(folder))


def _axolotl(stage: Stage, config: Config, folder: Path) -> list[str]:
    return _by_run("axolotl", stage, folder)


def _transformers(stage: Stage, config: Config, folder: Path) -> list[str]:
    return [*torchrun(config), *_by_run("transformers", stage, folder)]


def _trl(stage: Stage, config: Config, folder: Path) -> list[str]:
    several = Layout.of(config).world > 1
    launched = ["--accelerate_config", "trl_accelerate.yaml"] if several else []
    return [*_by_run("trl", stage, folder), *launched]


def _llamafactory(stage: Stage, config: Config, folder: Path) -> list[str]:
    # it is imported where no sound is, too
    (folder / "torchaudio.py").write_text('__version__ = "0"\n')
    command = _by_run("llamafactory", stage, folder, stage="pt")
    if Layout.of(config).world == 1:
        return command
    return [*_LAUNCH, "llamafactory_accelerate.yaml", "-m", "llamafactory.launcher", command[-1]]


def _msswift(stage: Stage, config: Config, folder: Path) -> list[str]:
    model = {"model_type": "llama", "template": "default"}
    return _by_run("msswift", stage, folder, **{COMMAND: "swift pt"}, **model)


def _unsloth(stage: Stage, config: Config, folder: Path) -> list[str]:
    script, lines = folder / "train_unsloth.py", folder / "lines.txt"
    given = ", ".join(f"{name}={value!r}" for name, value in _TRAINER.items())
    script.write_text(
        script.read_text().replace('output_dir="output"', f'output_dir="output", {given}')
    )
    texts = [json.loads(line)["text"] for line in stage.lines.read_text().splitlines()]
    lines.write_text("".join(f"{text}\n" for text in texts))
    return [str(script), str(lines)]


def _accelerate(stage: Stage, config: Config, folder: Path) -> list[str]:
    return [*_LAUNCH, "accelerate.yaml", _script("with_accelerate.py", stage, config, folder)]


def _lightning(stage: Stage, config: Config, folder: Path) -> list[str]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    _added(folder / "lightning.yaml", {"max_epochs": STEPS, "max_steps": STEPS, **quiet}, "trainer")
    script = _script("with_lightning.py", stage, config, folder)
    return [*torchrun(config), script, "fit", "--config", "lightning.yaml"]


def _deepspeed(stage: Stage, config: Config, folder: Path) -> list[str]:
    started = torchrun(config) or ["-m", "torch.distributed.run", "--standalone"]
    return [*started, _script("with_deepspeed.py", stage, config, folder)]


LORA = {"lora_rank": 8}
SPLIT = {"micro_batch_size": 2}
DDP, FSDP = ({"data_parallel": kind, "micro_batch_size": 4} for kind in ("ddp", "fsdp"))
NARROW, MIXED = {"precision": "bf16"}, {"precision": "bf16-mixed"}
CHECKPOINTED = {"activation_checkpointing": "full"}
# What a CPU can run; offloading needs a card.
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": NARROW,
    "bf16-mixed": MIXED,
    "accumulated": SPLIT,
    "accumulated-bf16": SPLIT | NARROW,
    "accumulated-bf16-mixed": SPLIT | MIXED | CHECKPOINTED,
    "checkpointed": CHECKPOINTED,
    "alternate": {"activation_checkpointing": "alternate"},
    "selective": {"activation_checkpointing": "selective"},
    "eager": {"attention": "eager"},
    "chunked": {"loss": "chunked"},
    "lora": LORA,
    "lora-bf16": LORA | NARROW,
    "lora-bf16-mixed": LORA | MIXED,
    "nf4": LORA | NARROW | {"quantization": "nf4"},
    "int8": LORA | NARROW | {"quantization": "int8"},
    **{
        name: {"optimizer": name}
        for name in (
            *(
                "adamw-foreach",
                "adamw-8bit",
                "adamw-4bit",
                "adamw-fp8",
                "lion-8bit",
                "adafactor",
                "sgd",
            ),
        )
    },
    **{
        name: NARROW | {"optimizer": name} for name in ("adamw-sr", "adamw-master", "adamw-8bit-sr")
    },
    "ddp": DDP,
    "ddp-accumulated": DDP | SPLIT | MIXED,
    "ddp-lora": DDP | LORA,
    "fsdp": FSDP,
    "fsdp-bf16": FSDP | NARROW,
    "fsdp-kept": FSDP | {"reshard_after_forward": False},
}


@dataclass(frozen=True)
class ToolRun:
    """How a tool is run, and what it is run on."""

    command: Command
    cases: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


_SIZES = ("fp32", "bf16-mixed", "accumulated")
_FORMATS = (*_SIZES, "bf16", "accumulated-bf16")
_DEEPSPEED = (
    "adamw-foreach",
    "adafactor",
    "sgd",
    "adamw-master",
    "ddp",
    "fsdp",
    "fsdp-bf16",
    "fsdp-kept",
)
_TRL = ("checkpointed", "selective", "chunked", "lora", "lora-bf16", "nf4", "adamw-8bit", "ddp")
_UNSLOTH = ("fp32", "accumulated", "checkpointed", "lora")
# its bf16 and its several ranks ask for cards
_AXOLOTL = (
    "fp32",
    "accumulated",
    "checkpointed",
    "selective",
    "eager",
    "chunked",
    "lora",
    "adafactor",
    "adamw-foreach",
    "adamw-8bit",
)
_LLAMAFACTORY = ("checkpointed", "adafactor", "ddp")
_MSSWIFT = ("checkpointed", "eager", "lora", "lora-bf16", "lora-bf16-mixed", "adafactor", "ddp")
RUNS = {
    "axolotl": ToolRun(_axolotl, _AXOLOTL, run_of("axolotl").environment),
    "transformers": ToolRun(_transformers, tuple(CASES)),
    "trl": ToolRun(_trl, (*_SIZES, "bf16", *_TRL)),
    "llamafactory": ToolRun(
        _llamafactory, (*_SIZES, *_LLAMAFACTORY), {"DISABLE_VERSION_CHECK": "1"}
    ),
    "msswift": ToolRun(_msswift, (*_FORMATS, *_MSSWIFT), run_of("msswift").environment),
    "unsloth": ToolRun(_unsloth, _UNSLOTH),
    "accelerate": ToolRun(_accelerate, (*_SIZES, "ddp", "fsdp"), {"ACCELERATE_USE_CPU": "true"}),
    "lightning": ToolRun(_lightning, (*_FORMATS, "ddp", "fsdp")),
    "deepspeed": ToolRun(_deepspeed, (*_FORMATS, *_DEEPSPEED)),
}
