"""Access control of `/engine/semkv/advise` and, where that is served, `/engine/semkv/explain`: Dynamo's status server
itself lets in everybody who reaches it.

An advice says whether KV of some text is there and where, for whatever tenant the question names, so a question from
beyond this machine needs a token. The token is part of the body, since a route of the status server is given nothing
else of the request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_semkv.config.forms import is_loopback
from dynamo_semkv.config.schema import SecurityConfig
from dynamo_semkv.dashboard.access import read_token, same_secret
from dynamo_semkv.telemetry.throttled import Throttled

_log = logging.getLogger(__name__)
_throttled = Throttled(_log)

ANYWHERE = "0.0.0.0"
"""The address on which Dynamo 1.6 listens unless DYN_SYSTEM_HOST says otherwise."""
FIELD = "security.advise_token_file"

Answer = Callable[[Any], Awaitable[dict[str, Any]]]


class GuardedRoute:
    """Checks the token of a question and passes the question on: body in, answer or `error` out. ContractError for a
    token file that cannot be used."""

    def __init__(self, answer: Answer, config: SecurityConfig, env: Mapping[str, str], name: str = "advise") -> None:
        """`name`: what the log calls it."""
        self._name = name
        self._answer = answer
        self._host = env.get("DYN_SYSTEM_HOST") or ANYWHERE
        self._token = read_token(config.advise_token_file, FIELD) if config.advise_token_file is not None else None
        self.counts: Counter[str] = Counter()
        """`answered`, `refused`."""

    async def answer(self, body: Any) -> dict[str, Any]:
        """`{"error": ...}` for a question that is refused; else what the callback answers to the body without its
        token."""
        refusal = self._refusal(body)
        if refusal is not None:
            self.counts["refused"] += 1
            _throttled.warning("%s: a question was refused: %s", self._name, refusal)
            return {"error": refusal}
        self.counts["answered"] += 1
        if isinstance(body, dict) and "token" in body and self._token is not None:
            body = {name: value for name, value in body.items() if name != "token"}
        return await self._answer(body)

    def _refusal(self, body: Any) -> str | None:
        if self._token is None:
            if is_loopback(self._host):
                return None
            return (
                f"token: Dynamo's status server listens on {self._host} and lets everybody in; set {FIELD} and send "
                "the token, or set DYN_SYSTEM_HOST=127.0.0.1"
            )
        given = body.get("token") if isinstance(body, dict) else None
        right = isinstance(given, str) and same_secret(given, self._token)
        return None if right else f"token: none, or another one than that of {FIELD}"
