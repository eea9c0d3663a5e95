"""`python -m dynamo_semkv`."""

from __future__ import annotations

import sys

from dynamo_semkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
