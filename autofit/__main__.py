"""The program `autofit`, which is the same as `python -m autofit`."""

import gc
import importlib
import signal
import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; Ctrl-C is told as later while it is imported, which takes half a second."""
    try:
        importlib.import_module("autofit.cli").main(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("autofit: interrupted.\n")
        if "--json" in (sys.argv if arguments is None else arguments):
            sys.stdout.write('{"schema": 1, "error": {"message": "interrupted.", "remedy": ""}}\n')
        sys.exit(130)
    finally:
        # all is said: libraries would end with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # or Python looks through all that was imported for garbage, which takes half a second


if __name__ == "__main__":
    main()
