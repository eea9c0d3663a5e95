"""Of the blocks that would be evicted next, one that the device holds too goes first."""

from __future__ import annotations

from dynamo_semkv.contracts.keys import BlockKey
from tests.worker_connector.ledger.test_ledger import SIZE, A, B, fill
from worker_connector.engine_api.request_view import pack_tokens, unpack_tokens
from worker_connector.ledger.ledger import LOOKED_AHEAD, Ledger


def evicted_by(ledger: Ledger, blocks: int) -> list[int]:
    """First tokens of the prompts that lose a block to a new prompt of that many."""
    fill(ledger, B, list(range(9000, 9000 + blocks * SIZE)))
    return [int(unpack_tokens(entry.chain()[0].tokens)[0]) for entry in ledger.take_departed()]


def test_oldest_leaf_that_the_device_holds_too_goes_before_older_ones() -> None:
    device: set[BlockKey] = set()
    ledger = Ledger(6, SIZE, device.__contains__)
    fill(ledger, A, [1, 1, 1, 1])
    twin = fill(ledger, A, [2, 2, 2, 2])
    fill(ledger, A, [3, 3, 3, 3])
    device.update(entry.key for entry in twin)
    assert evicted_by(ledger, 3) == [2, 2, 1]
    assert ledger.stats().on_device == 2


def test_device_copies_far_from_the_end_of_the_queue_stay() -> None:
    """They are asked for soon, and would be the next to leave the device."""
    device: set[BlockKey] = set()
    ledger = Ledger(LOOKED_AHEAD + 2, SIZE, device.__contains__)
    for first in range(1, LOOKED_AHEAD + 3):
        chain = fill(ledger, A, [first] * SIZE)
    device.update(entry.key for entry in chain)
    assert evicted_by(ledger, 1) == [1]
    assert ledger.stats().on_device == 0


def test_device_copy_that_is_too_young_for_the_newcomer_stays() -> None:
    device: set[BlockKey] = set()
    ledger = Ledger(2, SIZE, device.__contains__)
    fill(ledger, A, [1] * SIZE)
    limit = ledger.tick
    device.update(entry.key for entry in fill(ledger, A, [2] * SIZE))
    assert ledger.enter(B, None, pack_tokens([3] * SIZE), used_before=limit) is not None
    assert [int(unpack_tokens(entry.tokens)[0]) for entry in ledger.take_departed()] == [1]
