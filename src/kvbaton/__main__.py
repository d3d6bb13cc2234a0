"""`python -m kvbaton` is the command line."""

from __future__ import annotations

import sys

from kvbaton.cli import main

if __name__ == "__main__":
    sys.exit(main())
