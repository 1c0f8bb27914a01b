"""The house: who imports whom, what stays light, how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "autofit"

# Direct imports allowed between rooms; transitive ones follow. Everything may import core.
ALLOWED = {
    "core": set(),
    "hardware": {"core"},
    "search": {"core"},
    "report": {"core"},
    "models": {"core"},
    "setup": {"core"},
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
HEAVY_ONLY_WHERE_APPLIED = ("bitsandbytes", "torchao", "peft", "liger_kernel")
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The room a file lives in: its folder, or its own name at the top."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def reachable(name: str) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for below in ALLOWED[waiting.pop()] - found:
            found.add(below)
            waiting.append(below)
    return found | {name, "core"}


def imported(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    """Every module that a tree imports, also inside functions; `from autofit import x` counts as autofit.x."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "autofit":
                found += [(f"autofit.{alias.name}", node) for alias in node.names]
            else:
                found.append((node.module, node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards_only(path: Path) -> None:
    allowed = reachable(room(path))
    for name, node in imported(ast.parse(path.read_text())):
        if name.startswith("autofit."):
            target = name.split(".")[1]
            if target in ALLOWED:  # else a name of the package itself, such as __version__
                assert target in allowed, f"{path.name}:{node.lineno} imports {name}"


def test_rooms_have_no_circles() -> None:
    for name in ALLOWED:
        for below in reachable(name) - {name}:
            assert name not in reachable(below), f"{name} and {below} import each other"


def test_files_of_a_room_have_no_circles() -> None:
    graph = {}
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = {name for name, _ in imported(ast.parse(path.read_text())) if name.startswith("autofit")}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module in graph and module not in done:
            for below in graph[module] - {"autofit", module}:
                visit(below, (*trail, module))
            done.add(module)

    for module in graph:
        if module != "autofit":  # its imports are for type checkers; at run time names are resolved lazily
            visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_own_modules_and_optuna_are_imported_at_the_top_and_heavy_ones_where_applied(path: Path) -> None:
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in tree.body}
    for name, node in imported(tree):
        if path == PACKAGE / "__init__.py":
            continue
        if name.startswith("autofit"):
            assert id(node) in at_top, f"{path.name}:{node.lineno} imports {name} inside a function or a gate"
        if name.split(".")[0] == "optuna":
            assert room(path) == "search", f"{path.name} imports optuna"
        if name.split(".")[0] in HEAVY_ONLY_WHERE_APPLIED:
            assert id(node) not in at_top, f"{path.name}:{node.lineno} imports {name} at the top"


def test_core_and_search_and_export_and_report_know_no_torch() -> None:
    for path in FILES:
        if room(path) in ("core", "search", "export", "report"):
            names = {name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()))}
            assert not names & {"torch", "transformers"}, path
        if room(path) == "core":
            assert "optuna" not in {name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_open_with_a_docstring(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "say what the module is and why it stands here"


def test_every_technique_is_one_file_of_its_name() -> None:
    for path in (PACKAGE / "techniques").glob("*.py"):
        if path.stem != "__init__":
            names = {name for name, _ in imported(ast.parse(path.read_text())) if name.startswith("autofit.techniques")}
            assert not names, f"{path.name} imports another technique"
            assert f'name = "{path.stem}"' in path.read_text()


def test_the_house_has_no_shed() -> None:
    forbidden = ("util", "helper", "common", "base", "manager", "handler")
    for path in FILES:
        assert not any(word in path.stem for word in forbidden), path


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["search", "--help"], ["estimate", "--help"], ["models"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from autofit.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'optuna', 'peft', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
