"""`python -m parallel_rl.cli`."""

import sys

from parallel_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
