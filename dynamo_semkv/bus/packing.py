"""Packing: records that wait for one subject become as few stream messages as fit (contracts/pack.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_semkv.bus.acks import HEADERS_AT_MOST, Message
from dynamo_semkv.contracts.codec import encode_pack
from dynamo_semkv.contracts.pack import MAX_PACK_BYTES, MAX_PACK_RECORDS, PACK, Pack

_AROUND = 64
"""Bytes at most that a pack takes around its records and beside their content type."""
_AROUND_EACH = 5


def packed(heads: Sequence[Message], max_payload: int, ids: Iterator[str]) -> list[Message]:
    """The same records in the same order. Neighbours of one content type go into one pack, as many as a reader and the
    broker (`max_payload`, bytes) take; one without such a neighbour, one that is too big and what may have been sent
    before stay as they are.

    `ids` gives the id of each pack: never one of its records', which a caller may have used before.
    """
    most = min(MAX_PACK_BYTES, max_payload - HEADERS_AT_MOST)
    found: list[Message] = []
    run: list[Message] = []
    kind, size = None, 0
    for head in heads:
        content_type = head.headers.get("content-type")
        least = _AROUND + len(content_type or "")
        takes = len(head.payload) + _AROUND_EACH
        single = bool(head.records) or head.fixed or content_type == PACK or least + takes > most
        if run and (single or content_type != kind or len(run) == MAX_PACK_RECORDS or size + takes > most):
            found.append(_one(run, kind, ids))
            run = []
        if single:
            found.append(head)
            continue
        if not run:
            kind, size = content_type, least
        run.append(head)
        size += takes
    if run:
        found.append(_one(run, kind, ids))
    return found


def _one(run: list[Message], content_type: str | None, ids: Iterator[str]) -> Message:
    if len(run) == 1:
        return run[0]
    payload = encode_pack(Pack(content_type=content_type, records=tuple(record.payload for record in run)))
    return Message(payload, {"content-type": PACK, "Nats-Msg-Id": next(ids)}, tuple(run))
