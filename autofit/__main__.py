"""`python -m autofit` is the same as `autofit`."""

from autofit.cli import main

if __name__ == "__main__":
    main()
