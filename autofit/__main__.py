"""The program `autofit`, which is the same as `python -m autofit`."""

import importlib
import sys


def main() -> None:
    """Run the command line; Ctrl-C is a sentence also while it is imported, which takes half a second."""
    try:
        command_line = importlib.import_module("autofit.cli")
    except KeyboardInterrupt:
        sys.stderr.write("autofit: interrupted.\n")
        sys.exit(130)
    command_line.main()


if __name__ == "__main__":
    main()
