"""The connector's lines hold no prompt, no token ids and no salt, whatever the engine or a hint brings. Everything at
DEBUG."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_semkv.contracts.hints import HintDelivery, KvHintAction, KvHintsEnvelope
from tests.worker_connector.scripted import ScriptedEngine
from tests.worker_connector.through_callbacks import CallbackEngine
from worker_connector.errors import LoadFailed

SALT = "canary-salt-5e1f"
TOKEN = 987_654_321
TOKENS = [TOKEN, *range(1, 41)]
ROW = re.compile(r"\d+(?:, ?\d+){7}")
"""Eight numbers in a row: token ids, wherever they are printed."""


def served(engine: ScriptedEngine) -> Any:
    """The prompt is resident, and another request of it was asked about."""
    engine.serve(TOKENS, cache_salt=SALT)
    again = engine.request(TOKENS, cache_salt=SALT)
    engine.ask(again)
    return again


def healthy(engine: ScriptedEngine) -> None:
    engine.serve(TOKENS, cache_salt=SALT)
    engine.serve(TOKENS, cache_salt=SALT)


def a_page_that_is_none(engine: ScriptedEngine) -> None:
    again = served(engine)
    engine.allocate(again, 0, 40, 41)
    again.pages[0][3] = 64
    with pytest.raises(LoadFailed):
        engine.iterate((again, 1))


def a_damaged_block(engine: ScriptedEngine) -> None:
    again = served(engine)
    life = engine.leader._life
    assert life is not None
    assert life.ledger is not None
    fourth = next(entry for entry in life.ledger.entries() if entry.ordinal == 3)
    life.damaged(fourth.slot, loaded=True)
    engine.allocate(again, 0, 40, 41)
    with pytest.raises(LoadFailed):
        engine.iterate((again, 1))


def tokens_that_differ_from_those_asked_about(engine: ScriptedEngine) -> None:
    again = served(engine)
    again.tokens = [*TOKENS[:-1], TOKEN]
    engine.allocate(again, 0, 40, 41)
    engine.iterate((again, 1))


def tokens_that_are_none(engine: ScriptedEngine) -> None:
    for tokens in ([2**40 + TOKEN, *TOKENS], [-TOKEN, *TOKENS], ["canary-text", *TOKENS]):
        engine.ask(engine.request(tokens, cache_salt=SALT))


def a_salt_that_is_no_text(engine: ScriptedEngine) -> None:
    engine.serve(TOKENS, cache_salt=[SALT])


def hints_of_anybody(engine: ScriptedEngine) -> None:
    action = KvHintAction(
        action_id="a", action_type="semkv.donor", action_version="1.0", payload={"donor_id": SALT, "tokens": TOKENS}
    )
    envelope = KvHintsEnvelope(protocol_version="0.1", message_id=SALT, actions=[action])
    engine.serve(TOKENS, cache_salt=SALT, kv_hints=envelope)
    engine.serve(TOKENS, cache_salt=SALT, kv_hints={"protocol_version": SALT, "tokens": TOKENS})
    key = engine.sink.reports[-1].prompt_key
    engine.parts.event_publisher.table.put(
        HintDelivery(
            version="1.0", stable_routing_id="engine-a", dp_rank=0, prompt_key=key, envelope=envelope, traceparent=SALT
        )
    )
    engine.serve(TOKENS, cache_salt=SALT)


@pytest.mark.parametrize(
    "happens",
    [
        healthy,
        a_page_that_is_none,
        a_damaged_block,
        tokens_that_differ_from_those_asked_about,
        tokens_that_are_none,
        a_salt_that_is_no_text,
        hints_of_anybody,
    ],
    ids=lambda happens: happens.__name__,
)
def test_no_line_holds_content(happens: Callable[[ScriptedEngine], None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    happens(CallbackEngine())
    formatter = logging.Formatter("%(levelname)s %(message)s")
    lines = [formatter.format(record) for record in caplog.records if record.name.startswith("worker_connector")]
    assert lines
    for line in lines:
        for canary in (SALT, str(TOKEN), "canary-text"):
            assert canary not in line
        # Tracebacks show lines of source, and numbers in those are the source's.
        assert ROW.search(line) is None, line


def test_a_failed_load_is_said_with_the_engines_number(caplog: pytest.LogCaptureFixture) -> None:
    """Above DEBUG: it is what ties the engine threads' lines to a route."""
    a_page_that_is_none(CallbackEngine())
    said = [
        record.getMessage() for record in caplog.records if record.name == "worker_connector.leader.event_publisher"
    ]
    assert [text for text in said if "load_failed (copy_failed)" in text]
