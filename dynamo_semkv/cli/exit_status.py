"""Exit statuses of the commands."""

OK = 0
FAILED = 1
"""The verb could not do its work: no router answers, there is no such route, or nothing to serve."""
REFUSED = 2
"""A configuration or arguments that are refused; argparse uses it as well."""
PIPE_CLOSED = 141
"""The reader of the output went away; a shell reports the same of a program that SIGPIPE ended."""
