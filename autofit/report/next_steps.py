"""How to go on with a found config: what to type, as the page and the terminal tell it."""

from __future__ import annotations

import shlex
from pathlib import Path

from autofit.core.result import Result


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


def from_here(path: Path) -> str:
    """As one would type it in the directory that the command was given in."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
