"""Answers what became of a route, at `/engine/semkv/explain` of Dynamo's status server: for routers whose page is
off."""

from __future__ import annotations

from typing import Any

from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import check_route_id
from dynamo_semkv.observe.snapshot import explain, explain_request
from dynamo_semkv.outcome.history import History

MOST = 100
"""The most routes in one answer."""
_ALLOWED = f'one of {{"route_id": "..."}}, {{"request_id": "..."}} and {{"last": 1 to {MOST}}}'


class ExplainRoute:
    """Body in; `{"routes": [...]}`, as the page's API has them, or `error` out."""

    def __init__(self, history: History) -> None:
        self._history = history

    async def answer(self, body: Any) -> dict[str, Any]:
        """Routes of the history for a `route_id`, a `request_id` or the `last` n; no routes for an id that is unknown
        or not closed."""
        try:
            return {"routes": self._routes(body)}
        except ContractError as error:
            return {"error": str(error)}

    def _routes(self, body: Any) -> list[dict[str, Any]]:
        """Empty for a route or request that is unknown, or not closed yet."""
        if not isinstance(body, dict) or len(body) != 1:
            raise ContractError("body", sorted(body) if isinstance(body, dict) else type(body).__name__, _ALLOWED)
        ((name, value),) = body.items()
        if name == "last" and type(value) is int and 1 <= value <= MOST:
            return [explain(route) for route in self._history.recent(value)]
        if name == "route_id" and isinstance(value, str):
            route = self._history.get(check_route_id(value))
            return [] if route is None else [explain(route)]
        if name == "request_id" and isinstance(value, str):
            return explain_request(self._history, value)
        raise ContractError(str(name), value, _ALLOWED)
