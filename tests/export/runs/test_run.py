"""What is written for a tool to train some steps: a copy of its file, in which little is another."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autofit.core.errors import InputError
from autofit.export.importers import IMPORTERS, document_of
from autofit.export.importers.document import flat
from autofit.export.runs import RUNS, run_of
from autofit.export.runs.run import Stage
from autofit.export.tool import write
from tests.export.sources import source

TEXTS = ("ab", "bc")
# tool -> what its file says of saving, reporting and data, of which the copy says nothing
LEFT_OUT: dict[str, dict[str, Any]] = {
    "axolotl": {"wandb_project": "mine", "saves_per_epoch": 1, "test_datasets": [{"path": "x"}]},
    "llamafactory": {"val_size": 0.1, "plot_loss": True, "resume_from_checkpoint": "x"},
    "msswift": {"val_dataset": "x", "eval_steps": 5, "push_to_hub": True},
    "transformers": {"save_steps": 5, "push_to_hub": True},
    "trl": {"datasets": [{"path": "x"}], "eval_steps": 5, "assistant_only_loss": True},
}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, tmp_path / "weights", TEXTS, tmp_path / "tokens", 7)


def test_every_tool_of_texts_that_is_tuned_is_run() -> None:
    of_texts = {importer.tool.name for importer in IMPORTERS if importer.pictures is None}
    assert RUNS.keys() == of_texts
    with pytest.raises(InputError, match="how unsloth is run is not known"):
        run_of("unsloth")


@pytest.mark.parametrize("tool", RUNS)
def test_the_copy_says_what_the_file_says_but_for_data_steps_and_saving(
    tool: str, stage: Stage
) -> None:
    run = run_of(tool)
    exported = yaml.safe_load(write(run.tool, source("cpu")).files[run.file])
    keys = {**flat(exported), **LEFT_OUT[tool], "num_train_epochs": 3, "some.key": "of theirs"}
    arguments = run.prepare(keys, stage)

    copy = yaml.safe_load((stage.folder / run.file).read_text())
    assert copy["max_steps"] == 7
    assert copy["some"] == {"key": "of theirs"}
    assert copy["output_dir"].startswith(str(stage.folder))
    assert copy["save_strategy"] == "no"
    told = run.keys(keys, stage)
    for name in LEFT_OUT[tool]:
        assert copy.get(name) == told.get(name)
    for name, value in flat(exported).items():
        if name not in told and name not in run.without:
            assert flat(copy)[name] == value
    assert run.file in arguments or tool == "transformers"


@pytest.mark.parametrize("tool", [tool for tool in RUNS if tool != "transformers"])
def test_the_rows_are_where_the_copy_says(tool: str, stage: Stage) -> None:
    run = run_of(tool)
    run.prepare({}, stage)
    written = list(stage.folder.rglob("*.jsonl"))
    assert len(written) == 1
    assert written[0].read_text().count("\n") == len(TEXTS)
    named = (stage.folder / run.file, stage.folder / "dataset_info.json")
    texts = [path.read_text() for path in named if path.exists()]
    assert any(str(place) in text for text in texts for place in (written[0], written[0].parent))


def test_a_command_becomes_a_file_and_its_variables(stage: Stage) -> None:
    text = "MAX_PIXELS=9 swift pt --model m --torch_dtype float32 --dataset mine"
    document = document_of(text, "a command", is_command=True)
    run = run_of("msswift")
    assert run.prepare(document.keys, stage)[:3] == ["-m", "swift.cli.main", "pt"]
    copy = yaml.safe_load((stage.folder / run.file).read_text())
    assert copy["torch_dtype"] == "float32"
    assert copy["dataset"] != "mine"
    assert not [key for key in copy if key.startswith(("ENV", "launcher"))]
    assert run.variables(document.keys) == {"USE_HF": "1", "MAX_PIXELS": "9"}


def test_transformers_is_given_the_script_that_is_exported() -> None:
    beside = run_of("transformers").beside(source("cpu", weights="/some/weights"))
    (script,) = beside.values()
    assert "/some/weights" in script
