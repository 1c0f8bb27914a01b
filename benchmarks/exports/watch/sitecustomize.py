"""Python imports this before anything else: what the optimizer steps of a process take is written down there."""

import os

if "WATCHED_STEPS" in os.environ:
    from benchmarks.step_watch import watch

    watch(os.environ["WATCHED_STEPS"])
