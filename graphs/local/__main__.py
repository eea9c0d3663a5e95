"""`python -m graphs.local [up|demo]`. Ctrl-C ends it without a traceback, from its first line on: the imports take
seconds, and nothing has been started by then."""

import os
import signal
import sys

signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from graphs.local.command import main  # noqa: E402 - see above

if __name__ == "__main__":
    sys.exit(main())
