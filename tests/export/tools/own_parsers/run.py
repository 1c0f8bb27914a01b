"""Feeds files to one tool's own parser, in that tool's environment: run.py PARSER.py FILE...

Prints one line of JSON for each file: what it was refused for, or null.
"""

import contextlib
import json
import runpy
import sys

parse = runpy.run_path(sys.argv[1])["parse"]
for path in sys.argv[2:]:
    error = None
    with contextlib.redirect_stdout(sys.stderr):
        try:
            parse(path)
        except (Exception, SystemExit) as refused:
            error = f"{type(refused).__name__}: {refused}"
    sys.stdout.write(json.dumps({"file": path, "error": error}) + "\n")
