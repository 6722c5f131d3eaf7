"""python -m mpipar, the same as the console script."""

import sys

from mpipar.cli import main

if __name__ == "__main__":
    sys.exit(main())
