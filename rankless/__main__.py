"""Makes `python -m rankless` the command `rankless`."""

import sys

from rankless.cli import main

if __name__ == "__main__":
    sys.exit(main())
