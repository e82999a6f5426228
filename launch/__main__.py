"""`python -m ulysses.launch`: the `ulysses` command without an installed script."""

import sys

from ulysses.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
