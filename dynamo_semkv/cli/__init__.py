"""The command line, a file per verb. Only `serve` needs an installed Dynamo; each verb imports what it needs when it
runs."""

from dynamo_semkv.cli.command import OK, REFUSED, main

__all__ = ["OK", "REFUSED", "main"]
