"""DeadlineRunner: asks all providers under one hard deadline. What they return in time is evidence, everything else is
a miss with a reason.

No provider can delay or fail a request: each runs in a thread of its own, is skipped while it is stuck and put aside
when it keeps failing, and its results are checked, in its own thread, before they are used.

Fusion: providers are given in order of authority. What a provider proved (a prefix, verbatim runs) ranks above what
another only finds alike, and once one has proven `ENOUGH` of the prompt, the providers after it are not waited for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch
from dynamo_semkv.contracts.location import Location
from dynamo_semkv.evidence.breaker import Breaker
from dynamo_semkv.evidence.provider import Closes, EvidenceProvider, LookupQuery, PromptListener, Snapshots
from dynamo_semkv.evidence.worker import LATE, Answer, ProviderWorker
from dynamo_semkv.telemetry.throttled import Throttled

logger = logging.getLogger(__name__)
_throttled = Throttled(logger)

ENOUGH = 0.5
"""Share of the prompt that a match must have located for the providers after its own not to be waited for."""


MAX_STATE = 64 * 1_024
"""Characters of JSON that a provider may show of itself."""


class LookupStatus(str, Enum):
    """Closed: route events, metrics and the page use it."""

    HIT = "hit"
    MISS = "miss"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"
    """Not asked or not waited for: no provider, stuck in an earlier lookup, put aside after failures, or a provider
    before it had proven enough."""


class LookupResult(msgspec.Struct, frozen=True):
    """One lookup over all providers: the best matches, how it ended, and the status and seconds of each provider."""

    status: LookupStatus
    matches: tuple[SemanticTrtMatch, ...] = ()
    """Best first, one a donor: exact-equivalent, then verbatim runs, then likeness; each by reusable tokens."""
    seconds: float = 0.0
    by_provider: dict[str, tuple[LookupStatus, float]] = {}


@dataclass
class _ProviderSlot:
    worker: ProviderWorker
    breaker: Breaker
    counts: Counter[str] = field(default_factory=Counter)
    last_error: str = ""


class DeadlineRunner:
    """`deadline_seconds`: over all providers together, measured from the call. `min_overlap_tokens`: what is less is
    not evidence. `providers`: in order of authority.

    Belongs to one event loop at a time. `breaker_clock` is for tests; deadlines are always real time.
    """

    def __init__(
        self,
        providers: Sequence[EvidenceProvider],
        deadline_seconds: float,
        max_matches: int,
        *,
        min_overlap_tokens: int = 1,
        breaker_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.set_limits(deadline_seconds, max_matches, min_overlap_tokens)
        self._slots = [_ProviderSlot(ProviderWorker(provider), Breaker(breaker_clock)) for provider in providers]
        self._listening = [
            (slot, slot.worker.provider) for slot in self._slots if isinstance(slot.worker.provider, PromptListener)
        ]

    def set_limits(self, deadline_seconds: float, max_matches: int, min_overlap_tokens: int) -> None:
        """From the next lookup on."""
        self._deadline = deadline_seconds
        self._max_matches = max_matches
        self._min_overlap = min_overlap_tokens

    async def lookup(self, query: LookupQuery) -> LookupResult:
        """Returns by the deadline, whatever the providers do. Never raises (but CancelledError, which leaves nothing
        behind)."""
        began = time.monotonic()
        expires = began + self._deadline
        asked = {}
        for slot in self._slots:
            if slot.worker.free() and slot.breaker.allow():
                asked[slot.worker.name] = slot.worker.submit(query, expires)
        if asked:
            try:
                needless = await self._wait(asked, query, expires)
            except asyncio.CancelledError:
                self._abandon(asked)
                raise
            if needless:
                for name in needless:
                    asked.pop(name).cancel()
                self._abandon(needless)
        waited = time.monotonic() - began
        by_provider: dict[str, tuple[LookupStatus, float]] = {}
        matches: list[SemanticTrtMatch] = []
        for slot in self._slots:
            answer = asked.get(slot.worker.name)
            status, seconds, found = self._result_of(slot, answer, waited)
            slot.counts[status.value] += 1
            by_provider[slot.worker.name] = (status, seconds)
            matches += found
        for slot, listener in self._listening:
            self._pass_prompt(slot, listener, query)
        best = self._best(matches) if matches else ()
        overall = LookupStatus.HIT if best else _overall({status for status, _ in by_provider.values()})
        return LookupResult(overall, best, time.monotonic() - began, by_provider)

    async def _wait(self, asked: Mapping[str, asyncio.Future[Answer]], query: LookupQuery, expires: float) -> list[str]:
        """Waits until all have answered, the deadline is over, or enough is proven. Returns the names of those that
        need not answer any more."""
        if len(asked) == 1:
            (answer,) = asked.values()
            await _until(expires, answer)
            return []
        order = [slot.worker.name for slot in self._slots if slot.worker.name in asked]
        pending = set(asked.values())
        while pending and (left := expires - time.monotonic()) > 0:
            _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for at, name in enumerate(order[:-1]):
                if asked[name] in pending:
                    break  # it ranks above the rest and may still say more
                if self._enough(asked[name].result(), query):
                    return [later for later in order[at + 1 :] if asked[later] in pending]
        return []

    @staticmethod
    def _enough(answered: Answer, query: LookupQuery) -> bool:
        return answered.error is None and any(
            _located(match) >= ENOUGH * len(query.tokens) for match in answered.claims.matches
        )

    @staticmethod
    def _pass_prompt(slot: _ProviderSlot, listener: PromptListener, query: LookupQuery) -> None:
        try:
            listener.prompt_routed(query)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - somebody else's code, and SystemExit or CancelledError of its would end the loop or the request
            slot.counts["prompt_errors"] += 1
            name = slot.worker.name
            text = "provider %s failed to take note of a prompt; donors made of it have no text there"
            _throttled.exception(text, name, key=name)

    def _abandon(self, asked: Container[str]) -> None:
        """The answers are not needed any more. If this lookup was a breaker's trial, the next one is the trial."""
        for slot in self._slots:
            if slot.worker.name in asked:
                slot.breaker.abandon()

    def close(self, timeout: float = 1.0) -> None:
        """Ends the threads that can end within `timeout`; one that is inside a lookup dies with the process."""
        for slot in self._slots:
            slot.worker.stop()
        until = time.monotonic() + timeout
        for slot in self._slots:
            if isinstance(slot.worker.provider, Closes):
                try:
                    slot.worker.provider.close(max(0.0, until - time.monotonic()))
                except Exception:  # the others are still to be closed
                    logger.exception("provider %s could not be closed", slot.worker.name)
            if not slot.worker.join(max(0.0, until - time.monotonic())):
                logger.warning(
                    "provider %s is still inside a lookup; its thread ends with the process", slot.worker.name
                )

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: each provider's counters, breaker, and own state if it offers one."""
        plain: dict[str, Any] = {}
        for slot in self._slots:
            plain[slot.worker.name] = {
                "lookups": dict(slot.counts),
                "late": slot.worker.counts["late"],
                "expired": slot.worker.counts["expired"],
                "stuck": not slot.worker.free(),
                "breaker": slot.breaker.state.value,
                "opened": slot.breaker.opened,
                "last_error": slot.last_error,
                "state": self._state_of(slot),
            }
        return plain

    @staticmethod
    def _state_of(slot: _ProviderSlot) -> dict[str, Any]:
        """What the provider shows of itself; nothing where it fails at that, or it is not JSON-able or too much: a page
        is one document, and one part of it that cannot be written costs all others."""
        provider = slot.worker.provider
        if not isinstance(provider, Snapshots):
            return {}
        try:
            state = provider.snapshot()
            if not isinstance(state, dict):
                raise TypeError(f"a snapshot is a dict, not {type(state).__name__}")
            text = json.dumps(state, allow_nan=False)
            if len(text) > MAX_STATE:
                raise ValueError(f"a snapshot of {len(text)} characters, allowed: {MAX_STATE}")
        except Exception as error:  # noqa: BLE001 - somebody else's code; counted and logged
            slot.counts["snapshot_errors"] += 1
            name = slot.worker.name
            _throttled.warning("provider %s has no state to show: %r", name, error, key=name)
            return {}
        copied: dict[str, Any] = json.loads(
            text
        )  # whoever writes the page is not the only one who holds the provider's own
        return copied

    def _result_of(
        self, slot: _ProviderSlot, answer: asyncio.Future[Answer] | None, waited: float
    ) -> tuple[LookupStatus, float, list[SemanticTrtMatch]]:
        if answer is None:
            return LookupStatus.SKIPPED, 0.0, []
        if not answer.done() or answer.result() is LATE:
            # The answer that may still come is dropped: the future is settled or cancelled, and so never set.
            answer.cancel()
            slot.breaker.failure()
            return LookupStatus.TIMEOUT, waited, []
        answered = answer.result()
        if answered.error is not None:
            return self._failed(slot, answered.seconds, answered.error)
        sound, unsound, excess = answered.claims
        slot.counts["too_many_matches"] += excess
        slot.counts["unsound_matches"] += unsound
        if unsound and not sound:
            return self._failed(slot, answered.seconds, ValueError("every match was unsound"))
        slot.breaker.success()
        enough = [match for match in sound if match.reusable_token_count >= self._min_overlap]
        return (LookupStatus.HIT if enough else LookupStatus.MISS), answered.seconds, enough

    @staticmethod
    def _failed(
        slot: _ProviderSlot, seconds: float, error: BaseException
    ) -> tuple[LookupStatus, float, list[SemanticTrtMatch]]:
        slot.breaker.failure()
        # The type only: a message may quote the prompt.
        name, slot.last_error = slot.worker.name, type(error).__name__
        text = "provider %s failed with %s; its lookups are misses"
        _throttled.warning(text, name, slot.last_error, key=f"{name} {slot.last_error}")
        return LookupStatus.ERROR, seconds, []

    def _best(self, matches: list[SemanticTrtMatch]) -> tuple[SemanticTrtMatch, ...]:
        """One a donor, best first. Where some must be left out, the best of each place stays: the router may prefer
        another replica."""
        if len(matches) == 1:
            return tuple(matches[: self._max_matches])
        donors: dict[str, SemanticTrtMatch] = {}
        for match in sorted(matches, key=_rank):
            donors.setdefault(match.donor_id, match)
        ordered = list(donors.values())
        places: dict[Location, SemanticTrtMatch] = {}
        for match in ordered:
            places.setdefault(match.location, match)
        kept = [*places.values(), *(match for match in ordered if places[match.location] is not match)]
        return tuple(sorted(kept[: self._max_matches], key=_rank))


async def _until(expires: float, answer: asyncio.Future[Answer]) -> None:
    """Waits for the answer; at `expires` it becomes LATE. This costs half of `asyncio.wait`, which needs a future of
    its own and another step of the loop. Cancelling this cancels the answer too."""
    left = expires - time.monotonic()
    if left <= 0:
        return
    timer = asyncio.get_running_loop().call_later(left, _give_up, answer)
    try:
        await answer
    finally:
        timer.cancel()


def _give_up(answer: asyncio.Future[Answer]) -> None:
    if not answer.done():
        answer.set_result(LATE)


def _located(match: SemanticTrtMatch) -> int:
    """Tokens of which the match says where they are equal; 0 for one that only finds the donor alike."""
    return max(match.exact_prefix_tokens, sum(segment.token_count for segment in match.segments))


def _rank(match: SemanticTrtMatch) -> tuple[bool, bool, int, float, str, str]:
    semantic = match.match_type is not MatchType.EXACT_EQUIVALENT
    alike = _located(match) == 0
    return semantic, alike, -match.reusable_token_count, -match.confidence, match.provider, match.donor_id


def _overall(statuses: set[LookupStatus]) -> LookupStatus:
    """Of a lookup without matches."""
    for status in (LookupStatus.TIMEOUT, LookupStatus.ERROR, LookupStatus.MISS):
        if status in statuses:
            return status
    return LookupStatus.SKIPPED
