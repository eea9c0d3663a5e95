"""Fusion: providers side by side, in order of authority; what one proved ranks above what another finds alike."""

from __future__ import annotations

import asyncio
import threading

from dynamo_semkv.contracts.evidence import MatchType, SemanticTrtMatch, SemanticTrtSegment
from dynamo_semkv.evidence.deadline import DeadlineRunner, LookupStatus
from dynamo_semkv.evidence.provider import LookupQuery
from dynamo_semkv.testing import ScriptedProvider
from tests.evidence.test_deadline import QUERY, match

WHOLE = SemanticTrtSegment(target_start=0, donor_start=0, token_count=len(QUERY.tokens))
LATE = 600.0
"""A deadline that nobody here waits for."""


async def test_who_proved_ranks_above_who_only_finds_alike() -> None:
    """The embedding claims more tokens of both donors; the fingerprint says where."""
    run = SemanticTrtSegment(target_start=0, donor_start=0, token_count=100)
    proven = match("a", provider="fingerprint", reusable_token_count=120, segments=(run,))
    alike = [match(d, provider="embedding", reusable_token_count=250) for d in ("a", "b")]
    exact = match("c", match_type=MatchType.EXACT_EQUIVALENT, exact_prefix_tokens=64, reusable_token_count=64)
    said = {"fingerprint": [proven], "embedding": alike, "dynamo": [exact]}
    runner = DeadlineRunner([ScriptedProvider(matches, name=name) for name, matches in said.items()], 30.0, 8)
    result = await runner.lookup(QUERY)
    assert [(m.donor_id, m.provider) for m in result.matches] == [
        ("c", "scripted"),
        ("a", "fingerprint"),
        ("b", "embedding"),
    ]
    runner.close()


async def test_nobody_waits_for_a_provider_that_could_add_nothing() -> None:
    """The first one located most of the prompt. The second, which hangs, is neither waited for nor held to have
    failed."""
    slow = ScriptedProvider(name="embedding")
    slow._steps = [slow.hang]
    quick = ScriptedProvider(
        [match("a", segments=(WHOLE,), reusable_token_count=len(QUERY.tokens))], name="fingerprint"
    )
    runner = DeadlineRunner([quick, slow], LATE, 8)
    result = await runner.lookup(QUERY)
    assert result.by_provider["embedding"][0] is LookupStatus.SKIPPED
    assert result.status is LookupStatus.HIT
    assert runner.snapshot()["embedding"]["breaker"] == "closed"
    slow.release()
    runner.close()


async def test_a_provider_with_more_authority_is_waited_for() -> None:
    gate = threading.Event()

    def late(query: LookupQuery) -> list[SemanticTrtMatch]:
        gate.wait(30)
        return [match("first")]

    second = ScriptedProvider([match("second", segments=(WHOLE,))], name="second")
    runner = DeadlineRunner([ScriptedProvider(late, name="first"), second], LATE, 8)
    lookup = asyncio.ensure_future(runner.lookup(QUERY))
    await asyncio.to_thread(second.entered.wait, 30)
    assert not lookup.done()
    gate.set()
    assert {m.donor_id for m in (await lookup).matches} == {"first", "second"}
    runner.close()


async def test_prompt_listeners_hear_of_every_lookup_also_while_they_are_stuck() -> None:
    class Listening(ScriptedProvider):
        def __init__(self) -> None:
            super().__init__(name="listening")
            self.heard: list[LookupQuery] = []
            self.closed = False

        def prompt_routed(self, query: LookupQuery) -> None:
            self.heard.append(query)
            raise RuntimeError("a fault of a provider's is no fault of the lookup")

        def close(self, timeout: float) -> None:
            self.closed = True

    provider = Listening()
    provider._steps = [provider.hang]
    runner = DeadlineRunner([provider, ScriptedProvider([match("a")], name="other")], 0.2, 8)
    for _ in range(3):
        assert (await runner.lookup(QUERY)).status is LookupStatus.HIT
    assert provider.heard == [QUERY] * 3
    provider.release()
    runner.close()
    assert provider.closed
