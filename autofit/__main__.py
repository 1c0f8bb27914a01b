"""The program `autofit`, which is the same as `python -m autofit`."""

import gc
import importlib
import json
import signal
import sys

from autofit.core.errors import MEMORY_FULL, lacks_memory


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; Ctrl-C is told as later while it is imported, which takes half a second."""
    try:
        importlib.import_module("autofit.cli").main(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("autofit: interrupted.\n")
        if "--json" in (sys.argv if arguments is None else arguments):
            sys.stdout.write('{"schema": 1, "error": {"message": "interrupted.", "remedy": ""}}\n')
        sys.exit(130)
    except Exception as error:  # of the imports
        if not lacks_memory(error):
            raise
        message, remedy = MEMORY_FULL
        sys.stderr.write(f"autofit: {message} {remedy}\n")
        if "--json" in (sys.argv if arguments is None else arguments):
            told = {"schema": 1, "error": {"message": message, "remedy": remedy}}
            sys.stdout.write(f"{json.dumps(told)}\n")
        sys.exit(4)
    finally:
        # all is said: libraries would end with a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # or Python looks through all that was imported for garbage, which takes half a second


if __name__ == "__main__":
    main()
