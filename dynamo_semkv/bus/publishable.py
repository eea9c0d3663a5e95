"""What may be published: looked at in the caller's thread, so that nothing can arrive at the connection that would end
it."""

from __future__ import annotations

import functools
import re

from dynamo_semkv.bus.streams import stream_of

_TOKEN = r"[\x21-\x29\x2b-\x2d\x2f-\x3d\x3f-\x7e]+"  # printable ASCII but blank, `*`, `.`, `>`
_SUBJECT = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_SUBJECT_MAX = 512
_HEADER = re.compile(r"[\x21-\x7e]{1,256}")
_SUBJECTS_REMEMBERED = 512


@functools.lru_cache(_SUBJECTS_REMEMBERED)
def _looked_at(subject: str) -> tuple[bool, bool]:
    """Whether it is a subject, and whether a stream of ours keeps it."""
    sound = _SUBJECT.fullmatch(subject) is not None
    return sound, sound and stream_of(subject) is not None


def publishable(subject: object, payload: object, content_type: object, message_id: object, persistent: bool) -> bool:
    """Whether `publish` may accept the message; never raises. `persistent`: the subject must be one of our streams'."""
    if not isinstance(subject, str) or len(subject) > _SUBJECT_MAX or not isinstance(payload, bytes):
        return False
    for header in (content_type, message_id):
        if header is not None and not (isinstance(header, str) and _HEADER.fullmatch(header)):
            return False
    sound, kept = _looked_at(subject)
    return sound and (kept or not persistent)
