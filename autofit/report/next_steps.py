"""How to go on when a search has ended: what to type, as the page and the terminal tell it, and what lies where."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autofit.core.result import Result

_FILES = {
    "result": "the config, and what was measured",
    "script": "the same as a script of its own",
    "exports": "the same for other training tools",
    "report": "all of it to look at",
    "trace": "one step of the best config, for ui.perfetto.dev",
    "memory_snapshot": "its memory, for pytorch.org/memory_viz",
}


def commands(result: Result, directory: Path) -> list[tuple[str, str]]:
    """(what it is for, what to type) to train with the best config of a run directory."""
    path = shlex.quote(from_here(directory / "result.yaml"))
    found = []
    if result.source and result.source.get("kind") != "function":
        found.append(("Train", f"autofit train {path} --data DATA --weights WEIGHTS --output OUT"))
    else:
        found.append(
            (
                "Train in Python",
                "import autofit, yaml\n"
                f'config = yaml.safe_load(open("{from_here(directory / "result.yaml")}"))["config"]\n'
                "trained = autofit.fit(model, loader, config=config, lr=1e-4, epochs=1)",
            )
        )
    if result.files.get("script"):
        script = shlex.quote(from_here(directory / "train.py"))
        found.append(("Or without autofit", f"python {script} --data DATA --weights WEIGHTS --output OUT"))
    return found


def written(result: Result) -> RenderableType | None:
    """What the run directory holds for people to go on with; None where there is none."""
    directory = directory_of(result)
    if directory is None:
        return None
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, what in _FILES.items():
        path = result.files.get(name)
        if path:
            what = what.replace("was measured", "is predicted") if result.predicted_best else what
            grid.add_row(Text(f"  {Path(path).name}{'/' if name == 'exports' else ''}"), Text(what))
    return Group(Text(f"Written to {from_here(directory)}:", overflow="fold"), grid)


def directory_of(result: Result) -> Path | None:
    """Where the files are; None where there are none."""
    path = next((path for path in result.files.values() if path), None)
    return Path(path).parent if path else None


def from_here(path: Path) -> str:
    """As one would type it in the directory that the command was given in."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
