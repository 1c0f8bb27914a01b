"""Feeds files to one tool's own parser, in that tool's environment: run.py PARSER.py [--users] FILE...

Prints one line of JSON for each file: what it was refused for, or null. With `--users` the files are people's own, of
which the parser alone judges: none of our checks of what autofit exports.
"""

import contextlib
import io
import json
import runpy
import sys

parse = runpy.run_path(sys.argv[1])["parse"]
options = {}
files = sys.argv[2:]
if files[0] == "--users":
    options = {"exported": False}
    files = files[1:]
for path in files:
    error = None
    said = io.StringIO()
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(said):
        try:
            parse(path, **options)
        except SystemExit:  # of argparse, which writes why
            error = f"SystemExit: {said.getvalue().strip().splitlines()[-1:]}"
        except Exception as refused:
            error = f"{type(refused).__name__}: {refused}"
    sys.stderr.write(said.getvalue())
    sys.stdout.write(json.dumps({"file": path, "error": error}) + "\n")
