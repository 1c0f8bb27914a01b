"""`python -m benchmarks.zoo`."""

import sys

from benchmarks.zoo.run import main

if __name__ == "__main__":
    sys.exit(main())
