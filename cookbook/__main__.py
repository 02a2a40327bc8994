"""`python -m cookbook`: the command `cookbook`."""

import sys

from cookbook.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
