"""Unsloth's own reading of its YAML, and our check of the keywords in the script, whose import needs a GPU."""

import ast
import importlib.util
from pathlib import Path

ROOT = Path(importlib.util.find_spec("unsloth").submodule_search_locations[0])
MADE = {
    "from_pretrained": ROOT / "models" / "loader.py",
    "get_peft_model": ROOT / "models" / "llama.py",
}


def parse(path):
    if path.endswith(".yaml"):
        from unsloth_cli.config import load_config

        load_config(Path(path))
        return
    for call in ast.walk(ast.parse(Path(path).read_text())):
        name = (
            call.func.attr
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            else None
        )
        if name in MADE:
            given = {keyword.arg for keyword in call.keywords}
            assert given <= parameters(name), (
                f"our check: {name} takes no {sorted(given - parameters(name))}"
            )


def parameters(name):
    """All that a function of that name takes, in the file that defines it."""
    tree = ast.parse(MADE[name].read_text())
    functions = [
        each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name
    ]
    return {
        argument.arg for each in functions for argument in (*each.args.args, *each.args.kwonlyargs)
    }
