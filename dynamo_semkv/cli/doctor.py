"""`doctor` looks at a live graph from outside and says what is missing, and what to do. It changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from dynamo_semkv.cli import configuration, page
from dynamo_semkv.cli.exit_status import FAILED, OK, REFUSED
from dynamo_semkv.cli.text import clean
from dynamo_semkv.contracts.errors import ContractError


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """Makes the verb's parser."""
    parser = commands.add_parser("doctor", help="what a live graph is missing, and what to do", allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", default=configuration.default_path(), help=configuration.HELP)
    page.add_arguments(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """FAILED when something keeps the graph from working; OK when there are only warnings."""
    from dynamo_semkv.bus.inspection import inspect
    from dynamo_semkv.observe.diagnosis import Finding, diagnose
    from dynamo_semkv.observe.health import Level

    loaded = configuration.load_or_report(arguments.config)
    if loaded is None:
        return REFUSED
    router, snapshot, unread = None, None, None
    try:
        if arguments.url is not None:
            router = page.Page.of(arguments)
            snapshot = router.snapshot()
    except ContractError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except page.PageError as error:
        unread = Finding("page", Level.FAIL, str(error))
    read_at = time.time()
    asked_page_only = arguments.url is not None and not configuration.names_a_broker(loaded)
    bus = None if asked_page_only else asyncio.run(inspect(loaded.config.bus))
    now = time.time()
    try:
        with router.reading() if router is not None else nullcontext():
            findings = diagnose(loaded.config, bus, snapshot, now, page_read_at=read_at)
    except page.PageError as error:
        unread = Finding("page", Level.FAIL, str(error))
        findings = diagnose(loaded.config, bus, None, now)
    findings += [unread] if unread is not None else []
    if arguments.json:
        print(json.dumps([{**asdict(finding), "level": finding.level.value} for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.level.value:<4}  {clean(finding.check)}: {clean(finding.detail)}")
            if finding.remedy and finding.level is not Level.OK:
                print(f"      -> {finding.remedy}")
        if arguments.url is None:
            print("A router's page knows more: add --url http://127.0.0.1:PORT (its log says `dashboard: http://...`)")
    return FAILED if any(finding.level is Level.FAIL for finding in findings) else OK
