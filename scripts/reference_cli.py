# ruff: noqa: E501 - paragraphs and tables of Markdown
"""Makes docs/reference/cli.md: every verb with its arguments, from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from field_docs import cell

from dynamo_semkv.cli import exit_status
from dynamo_semkv.cli.bench import PROGRAMS
from dynamo_semkv.cli.command import _parser

INTRO = """\
# Command line

Made by `python scripts/reference.py`; a test keeps it current. `python -m dynamo_semkv VERB`, or `dynamo_semkv VERB` where the package's
scripts are on PATH; `--help` behind any verb says the same. Each verb is documented where it is used: [README](../../README.md),
[operations](../operations.md), [deployment](../deploy.md).
"""
STATUSES = {
    "OK": "done; for `doctor`: nothing keeps the graph from working (there may be warnings)",
    "FAILED": "`status`, `explain`: the page could not be read, or knows no such route; `doctor`: something keeps "
    "the graph from working; `setup-bus`: the broker refused",
    "REFUSED": "a configuration, argument or environment that cannot be used; standard error says which field, the "
    "value, and what is allowed",
    "PIPE_CLOSED": "whoever read the output went away (`| head`)",
}


def verbs(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """(words, what it does, parser) of every verb that is not just a group of others."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, below in action.choices.items():
                if any(isinstance(inner, argparse._SubParsersAction) for inner in below._actions):
                    yield from verbs(below, f"{prefix}{name} ")
                else:
                    yield f"{prefix}{name}", helps.get(name, ""), below


def arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """(argument as it is shown, its help) of a parser, `--help` left out."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar if isinstance(action.metavar, str) else None
        if action.choices is not None:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        if not action.option_strings:
            shown = value or action.dest.upper()
            yield (f"[{shown}]" if action.nargs in ("?", "*") else shown), action.help or ""
            continue
        names = ", ".join(action.option_strings)
        takes = "" if action.nargs == 0 else f" {value or action.dest.upper()}"
        yield f"{names}{takes}", (action.help or "") + (" (required)" if action.required else "")


def page() -> str:
    """The whole page as Markdown."""
    parts = [INTRO]
    for words, does, parser in verbs(_parser()):
        parts.append(f"\n## `{words}`\n\n{does[:1].upper()}{does[1:]}.\n")
        program = words.removeprefix("bench ")
        if words.startswith("bench "):
            parts.append(f"Its arguments are the program's own: `python -m {PROGRAMS[program][0]} --help`.")
            continue
        rows = list(arguments(parser))
        parts.append("| argument | meaning |\n|---|---|")
        parts += [f"| `{cell(name)}` | {cell(meaning.replace('<', '&lt;'))} |" for name, meaning in rows]
    parts.append("\n## Exit status\n\n| status | when |\n|---|---|")
    parts += [f"| {getattr(exit_status, name)} | {text} |" for name, text in STATUSES.items()]
    parts.append(
        "\n`bench` returns the status of its program. `serve` ends with 0 after SIGTERM or Ctrl-C, when running "
        "streams have ended."
    )
    return "\n".join(parts) + "\n"
