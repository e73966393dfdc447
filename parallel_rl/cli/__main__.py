"""`python -m parallel_rl.cli`."""

import sys

from parallel_rl.cli import main

sys.exit(main())
