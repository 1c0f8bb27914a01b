"""`python -m benchmarks.faults`."""

import sys

from benchmarks.faults.run import main

if __name__ == "__main__":
    sys.exit(main())
