"""Whether memory, seconds and bytes grow no faster than data, models and results do.

    python -m benchmarks.scale [PART ...] [--help]

Each module of this folder is a part: its `main` takes no arguments, prints a table, and returns what
is kept under its name in `results/scale.json`.
"""

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path

import benchmarks.scale

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"


def main() -> int:
    """Run all parts, or those that are named, and keep what they find."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.scale.__path__)]
    parts = [name for name in names if not name.startswith("_")]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    chosen = parser.parse_args().parts or parts
    for name in chosen:
        if name not in parts:
            parser.error(f"no part is named {name}: there are {', '.join(parts)}")

    for name in chosen:
        found = importlib.import_module(f"benchmarks.scale.{name}").main()
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept[name] = found
        RESULTS.write_text(f"{json.dumps(kept, indent=1)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
