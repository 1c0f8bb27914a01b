"""accelerate: its launcher reads the config."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, source

SEVERAL = ("ddp", "fsdp", "hsdp", "tensor", "context")
DYNAMO = {"backend", "mode", "use_regional_compilation", "use_dynamic", "use_fullgraph"}


def launched(path: Path, text: str) -> Any:
    """What the launcher makes of it; it takes any key inside of dynamo_config, so our check names those it knows."""
    file = path / "accelerate.yaml"
    file.write_text(text)
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert {key.removeprefix("dynamo_") for key in defaults.dynamo_config} <= DYNAMO
    assert all(
        hasattr(arguments, key) for key in (*defaults.fsdp_config, *defaults.parallelism_config)
    )
    return arguments


@pytest.mark.parametrize("case", CASES)
def test_its_launcher_takes_every_case(case: str, tmp_path: Path) -> None:
    made = write(tool_named("accelerate"), source(**CASES[case]))
    arguments = launched(tmp_path, made.files["accelerate.yaml"])
    assert arguments.num_processes == (4 if case in SEVERAL else 1)
    assert arguments.mixed_precision == ("bf16" if case in ("compiled", "ddp") else "no")
    assert str(arguments.dynamo_backend).lower() == ("inductor" if case == "compiled" else "no")
    assert bool(arguments.dynamo_use_regional_compilation) is (case == "compiled")


SIZES = {"hsdp": (2, 2, 1, 1), "tensor": (1, 2, 2, 1), "context": (1, 2, 1, 2)}


@pytest.mark.parametrize(
    ("tool", "case"),
    [
        *(("accelerate", case) for case in SEVERAL),
        ("trl", "hsdp"),
        ("trl", "context"),
        ("llamafactory", "fsdp"),
    ],
)
def test_processes_are_made_as_the_launcher_tells_them(
    tool: str, case: str, tmp_path: Path
) -> None:
    """accelerate's own plugins, from the environment that its launcher gives each process."""
    files = write(tool_named(tool), source(**CASES[case])).files
    arguments = launched(tmp_path, list(files.values())[tool != "accelerate"])
    assert (arguments.num_processes, arguments.multi_gpu) == (4, case == "ddp")
    if case == "ddp":
        return
    with mock.patch.dict(os.environ, prepare_multi_gpu_env(arguments)):
        plugin = FullyShardedDataParallelPlugin()
        sizes = ParallelismConfig() if case in SIZES else None
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, case != "hsdp")
    assert (plugin.cpu_offload.__class__.__name__ == "CPUOffloadPolicy") is (case == "fsdp")
    if sizes:
        found = (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.cp_size)
        assert (found, sizes.total_size) == (SIZES[case], 4)


def test_its_launcher_refuses_wrong_keys(tmp_path: Path) -> None:
    text = write(tool_named("accelerate"), source(compile="default")).files["accelerate.yaml"]
    with pytest.raises(ValueError, match="mixed_precison"):
        launched(tmp_path, text.replace("mixed_precision", "mixed_precison"))
    with pytest.raises(AssertionError):
        launched(tmp_path, text.replace("dynamo_mode", "dynamo_modus"))


def test_what_its_script_has_to_do_is_said() -> None:
    made = write(tool_named("accelerate"), source(precision="bf16", loss="chunked"))
    assert {each.knob for each in made.departures} == {
        *("precision", "loss", "micro_batch_size", "gradient_accumulation_steps")
    }
