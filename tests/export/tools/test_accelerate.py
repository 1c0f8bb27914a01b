"""accelerate: its launcher reads the config."""

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from autofit.export.tool import write
from autofit.export.tools import tool_named
from tests.export.sources import CASES, source

DYNAMO = {"backend", "mode", "use_regional_compilation", "use_dynamic", "use_fullgraph"}


def launched(path: Path, text: str) -> Any:
    """What the launcher makes of it; it takes any key inside of dynamo_config, so our check names those it knows."""
    file = path / "accelerate.yaml"
    file.write_text(text)
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert {key.removeprefix("dynamo_") for key in defaults.dynamo_config} <= DYNAMO
    return arguments


@pytest.mark.parametrize("case", CASES)
def test_its_launcher_takes_every_case(case: str, tmp_path: Path) -> None:
    made = write(tool_named("accelerate"), source(**CASES[case]))
    arguments = launched(tmp_path, made.files["accelerate.yaml"])
    assert arguments.num_processes == 1
    assert arguments.mixed_precision == ("bf16" if case == "compiled" else "no")
    assert str(arguments.dynamo_backend).lower() == ("inductor" if case == "compiled" else "no")
    assert bool(arguments.dynamo_use_regional_compilation) is (case == "compiled")


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
