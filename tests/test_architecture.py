"""The house: who imports whom, what stays light, how long a file may be."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from autofit.core.tasks import TASK_NAMES, TASKS
from autofit.tuning.warm_start import MEASURING

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autofit"

# Direct imports allowed between rooms; transitive ones follow. Everything may import core.
ALLOWED = {
    "core": set(),
    "hardware": {"core"},
    "search": {"core"},
    "report": {"core"},
    "models": {"core"},
    "distributed": {"core"},
    "setup": {"distributed"},
    "techniques": {"setup"},
    "data": {"core"},
    "training": {"data", "techniques", "hardware"},
    "probe": {"training"},
    "estimate": {"training"},
    "export": {"training", "report", "models"},
    "tuning": {"search", "probe", "estimate", "export"},
    "api": {"tuning"},
    "cli": {"api"},
    "__main__": {"cli"},
    "__init__": {"api"},
}
HEAVY_ONLY_WHERE_APPLIED = ("bitsandbytes", "torchao", "peft", "liger_kernel", "ray")
NO_TORCH = ("core", "search", "export", "report")
MOST_LINES = 600
MOST_KNOB_NAMES = 140


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = set(map(module_name, FILES))


class Source:
    """One file of the package, read and parsed once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        parts = path.relative_to(PACKAGE).parts
        self.room = parts[0] if len(parts) > 1 else path.stem
        self.module = module_name(path)
        self.imports = list(imports_of(self.tree))

    def imported_packages(self) -> Iterator[tuple[str, ast.stmt]]:
        for name, node in self.imports:
            yield name.split(".")[0], node

    def at_top(self, node: ast.stmt) -> bool:
        return any(node is each for each in self.tree.body)


def imports_of(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that a tree imports, also inside functions; x of `from autofit import x` counts as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                (name if node.module == "autofit" or name in MODULES else node.module, node)
                for name in names
            )


@functools.cache
def sources() -> list[Source]:
    """All of them; not when tests are collected, which each of several processes does."""
    return [Source(path) for path in FILES]


def reachable(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        below = ALLOWED[waiting.pop()] - found
        found |= below
        waiting += below
    return found | {name, "core"}


def none_of(violations: Iterable[str]) -> None:
    """Fail with all of them, one a line."""
    lines = list(violations)
    assert not lines, "\n" + "\n".join(lines)


def test_imports_run_downwards_only() -> None:
    none_of(
        f"{source.name}:{node.lineno} imports {name}"
        for source in sources()
        for name, node in source.imports
        if name.startswith("autofit.")
        and name.split(".")[1]
        in ALLOWED.keys() - reachable(source.room)  # not a name of the package, as __version__
    )


def test_every_room_has_its_directions() -> None:
    assert {source.room for source in sources()} == ALLOWED.keys()


def test_stored_measurements_are_of_all_the_code_that_measures() -> None:
    assert set(MEASURING) == reachable("probe")


def test_rooms_have_no_circles() -> None:
    for name in ALLOWED:
        for below in reachable(name) - {name}:
            assert name not in reachable(below), f"{name} and {below} import each other"


def test_files_of_a_room_have_no_circles() -> None:
    graph = {
        source.module: {name for name, _ in source.imports} & MODULES - {source.module}
        for source in sources()
        if source.module
        != "autofit"  # its imports are for type checkers; at run time names are resolved lazily
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle


def test_own_modules_are_imported_at_the_top_and_heavy_ones_where_applied() -> None:
    for source in sources():
        if source.module == "autofit":
            continue
        none_of(
            f"{source.name}:{node.lineno} imports {package} {'at the top' if heavy else 'inside a function or a gate'}"
            for package, node in source.imported_packages()
            if package in ("autofit", *HEAVY_ONLY_WHERE_APPLIED)
            if (heavy := package != "autofit") is source.at_top(node)
        )


def test_torch_and_optuna_stay_in_their_rooms() -> None:
    none_of(
        f"{source.name}:{node.lineno} imports {package}"
        for source in sources()
        for package, node in source.imported_packages()
        if (package in ("torch", "transformers") and source.room in NO_TORCH)
        or (package == "optuna" and source.room != "search")
    )


def test_every_console_is_one_that_shows_no_control_characters() -> None:
    none_of(
        f"{source.name}:{node.lineno} makes a Console; a Terminal is safe for texts of others"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Console"
    )


def test_files_are_short_and_open_with_a_docstring() -> None:
    none_of(
        f"{source.name}: {wrong}"
        for source in sources()
        for wrong, holds in {
            f"has {source.text.count(chr(10))} lines, of at most {MOST_LINES}": source.text.count(
                "\n"
            )
            > MOST_LINES,
            "lacks a docstring that says what it is and why it stands here": not ast.get_docstring(
                source.tree
            ),
        }.items()
        if holds
    )


def test_every_technique_is_one_file_of_its_name() -> None:
    for source in sources():
        if source.room == "techniques" and source.path.stem != "__init__":
            none_of(
                f"{source.name}:{node.lineno} imports another technique"
                for name, node in source.imports
                if name.startswith("autofit.techniques")
            )
            record = f"from autofit.core.knobs.{source.path.stem} import"
            assert record in source.text, f"{source.name} has no record of its name"


def test_few_places_know_a_knob_by_name() -> None:
    """What others need to know of a knob stands in its record; code that is about one reads `config.lora_rank`. Words
    that happen to be a knob's name (a batch's "loss", a checkpoint's "optimizer") are counted, too."""
    knobs = {path.stem for path in (PACKAGE / "techniques").glob("*.py")}
    places = [
        f"{source.name}:{node.lineno} {node.value}"
        for source in sources()
        if source.room not in ("techniques", "export")
        and not source.module.startswith("autofit.core.knobs.")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value in knobs
    ]
    assert len(places) <= MOST_KNOB_NAMES, "\n".join(["", *places])


def test_every_task_is_one_file_of_its_name() -> None:
    files = [source for source in sources() if source.module.startswith("autofit.core.tasks.")]
    own = {source.path.stem.replace("_", "-"): source for source in files}
    assert own.keys() == TASKS.keys()
    none_of(
        f"{source.name}:{node.lineno} names {node.value}; ask the task what is to be known of it"
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and node.value in TASK_NAMES
        and source is not own[node.value]
    )


def test_the_house_has_no_shed() -> None:
    forbidden = ("util", "helper", "common", "base", "manager", "handler")
    none_of(
        source.name for source in sources() if any(word in source.path.stem for word in forbidden)
    )


LIGHT = """
import sys
from autofit.cli import main
for arguments in ["--help"], ["--version"], ["search", "--help"], ["estimate", "--help"], ["models"]:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
    heavy = {"torch", "transformers", "optuna", "peft", "numpy"} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
