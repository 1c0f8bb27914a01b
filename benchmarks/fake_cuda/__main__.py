"""`python -m benchmarks.fake_cuda`."""

import sys

from benchmarks.fake_cuda.run import main

if __name__ == "__main__":
    sys.exit(main())
