"""The command line, a file per verb. Only `serve` needs an installed Dynamo; each verb imports what it needs when it
runs.

Verbs: `serve.py`, `check_config.py`, `doctor.py`, `explain.py`, `status.py`, `setup_bus.py`, `bench.py`; `command.py`
reads the arguments, `configuration.py` the file, `page.py` a router's page, `exit_status.py` says what a verb exits
with. What they print: `explain_view.py`, `status_view.py`, `sources_view.py`, `tables.py`, `text.py`, `words.py`.
"""

from dynamo_semkv.cli.command import OK, REFUSED, main

__all__ = ["OK", "REFUSED", "main"]
