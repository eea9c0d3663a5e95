"""What the commands exit with."""

OK = 0
FAILED = 1
"""What was asked for could not be had: no router there, no such route, nothing to serve."""
REFUSED = 2
"""A configuration or arguments that are refused; argparse uses it as well."""
PIPE_CLOSED = 141
"""Whoever read the output went away: what a shell reports of a program that SIGPIPE ended."""
