"""Providers and scorers that users plug in: `plugins.providers` and `plugins.scorers` name what is imported when the
router starts.

    plugged_providers(config) -> list[EvidenceProvider]
    plugged_scorers(config, on_fault, clock=time.monotonic) -> list[GuardedScorer]

Each entry is `module:name`, several are separated by commas; the name is a class or a function that is called without
arguments. An entry that cannot be used is refused at the start (ContractError), never at a request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, cast

from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.evidence.provider import EvidenceProvider
from dynamo_semkv.scoring.extra import ExtraScorer, GuardedScorer

logger = logging.getLogger(__name__)


def plugged_providers(config: Config) -> list[EvidenceProvider]:
    """The providers of `plugins.providers`, in their order. ContractError for one without a usable `name` or
    `lookup`."""
    found: list[EvidenceProvider] = []
    for entry, made in _made("plugins.providers", config.plugins.providers):
        name = getattr(made, "name", None)
        if not isinstance(name, str) or not name.isidentifier() or not callable(getattr(made, "lookup", None)):
            allowed = "what has a `name` (letters, digits, _) and a method `lookup` (docs/writing-a-provider.md)"
            raise ContractError("plugins.providers", entry, allowed)
        found.append(cast(EvidenceProvider, made))
    return found


def plugged_scorers(
    config: Config, on_fault: Callable[[BaseException], None], clock: Callable[[], float] = time.monotonic
) -> list[GuardedScorer]:
    """The scorers of `plugins.scorers`, each guarded; `on_fault` gets what one raises. ContractError for one that is
    unfit or has the name of another."""
    found: list[GuardedScorer] = []
    for entry, made in _made("plugins.scorers", config.plugins.scorers):
        try:
            scorer = GuardedScorer(cast(ExtraScorer, made), on_fault, clock)
        except ContractError as error:
            raise ContractError("plugins.scorers", entry, f"{error} (docs/writing-a-scorer.md)") from error
        if scorer.name in {other.name for other in found}:
            raise ContractError("plugins.scorers", entry, f"one scorer of the name {scorer.name}")
        found.append(scorer)
    return found


def distinct(providers: list[EvidenceProvider]) -> list[EvidenceProvider]:
    """The providers as given. ContractError for two of one name: they would share a row of every table."""
    names = [provider.name for provider in providers]
    for name in names:
        if names.count(name) > 1:
            raise ContractError("plugins.providers", name, "one provider of a name; ours have theirs")
    return providers


def _made(field: str, text: str | None) -> Iterator[tuple[str, Any]]:
    for entry in filter(None, (part.strip() for part in (text or "").split(","))):
        module, _, name = entry.partition(":")
        logger.info(
            "%s: importing %s", field, entry
        )  # before it: an import that hangs is otherwise a router that hangs
        try:
            found: Any = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            made = found()
        except (Exception, SystemExit) as error:  # a script that was written to be run, not imported, ends itself
            allowed = "module:name of a class or function that can be imported and called without arguments"
            raise ContractError(field, entry, f"{allowed} ({type(error).__name__}: {error})") from error
        yield entry, made
