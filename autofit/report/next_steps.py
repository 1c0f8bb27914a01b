"""How to go on after a search: what to type, and which file of the run directory is for what."""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.core.quoting import python_string, shell_path
from autofit.core.result import Result

_FILES = {
    "result": "the config, and what was measured",
    "script": "the same as a script of its own",
    "exports": "the same for other training tools",
    "report": "all of it to look at",
    "trace": "one step of the best config, for ui.perfetto.dev",
    "operators": "its operators, by the time they took",
    "tensorboard": "the trace, for TensorBoard's torch-tb-profiler",
    "memory_snapshot": "its memory, for pytorch.org/memory_viz",
}


def commands(result: Result, directory: Path) -> list[tuple[str, str]]:
    """(title, what to type) to train with the best config of a run directory: a line for a shell,
    or several of Python."""
    saved = _as_typed(directory / "result.yaml")
    data = shell_path(str(result.source.get("data", "DATA")))
    weights = shell_path(str(result.source.get("weights", "WEIGHTS")))
    options = f"--data {data} --weights {weights} --output OUT"

    if result.source and result.source.get("kind") != "function":
        path = shell_path(saved)
        steps = [("Train", f"autofit train {path} {options}")]
    else:
        path = python_string(saved)
        python = (
            "import autofit, yaml",
            f'config = yaml.safe_load(open({path}))["config"]',
            "trained = autofit.fit(model, loader, config=config, epochs=1)",
        )
        steps = [("Train in Python", "\n".join(python))]

    if result.files.get("script"):
        script = shell_path(_as_typed(directory / "train.py"))
        steps.append(("Or without autofit", f"python {script} {options}"))

    return steps


def written(result: Result) -> RenderableType | None:
    """The files of the run directory that people go on with; None where there is none."""
    directory = directory_of(result)
    if directory is None:
        return None

    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, purpose in _FILES.items():
        path = result.files.get(name)
        if not path:
            continue

        shown = Path(path).name
        if name == "tensorboard":
            shown = "tensorboard/"
        elif name == "exports":
            shown += "/"

        if result.predicted_best:
            purpose = purpose.replace("was measured", "is predicted")
        grid.add_row(Text(f"  {shown}"), Text(purpose))

    return Group(Text(f"Written to {_as_typed(directory)}:", overflow="fold"), grid)


def directory_of(result: Result) -> Path | None:
    """Where the files are; None where there are none."""
    for path in result.files.values():
        if path:
            return Path(path).parent

    return None


def _as_typed(path: Path) -> str:
    """A path as one would type it in the current directory."""
    here = Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)

    return str(path)
