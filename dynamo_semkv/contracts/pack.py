"""Pack: several records of one subject in one stream message, which the broker stores, acknowledges and delivers once.

Routes and reports are small and come by the hundred a second, and what each costs in broker, writer and reader is the
message around it. Of records alone: a stream whose readers need their order, or the last of a subject, has none
(bus/streams.py:in_any_order).
"""

from __future__ import annotations

import msgspec

PACK_VERSION = "2.0"
"""Records are of 1.x. A reader that knows no packs takes one for a record, and finds a version that it does not speak:
counted and named, where another shape would be a broken message."""
PACK = "application/vnd.semkv.pack+msgpack"
"""Content type (NATS header `content-type`) of a pack: known before anything is decoded."""
MAX_PACK_RECORDS = 64
MAX_PACK_BYTES = 16 * 1024
"""As much as one record may have: no message on these subjects became larger, and none is too large for its version to
be looked at. It holds some thirty of today's records; more in one would save a thirtieth of what is left."""


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """Each record is what it would be alone under the same subject, and has its own size cap there."""

    version: str = PACK_VERSION
    content_type: str | None = None
    """Of every record; None: none was named."""
    records: tuple[bytes, ...]
    """1 to 64, oldest first."""
