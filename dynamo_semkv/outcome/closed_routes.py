"""ClosedRoutes: what a RouteTracker remembers of routes that are closed, so that nothing counts twice. Bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_semkv.outcome.closed import ReplicaName
from dynamo_semkv.outcome.queues import Bounded

SAME_PROMPT_REMEMBERED = 16


@dataclass(frozen=True)
class Remembered:
    """One closed route."""

    replica: ReplicaName | None
    """Which replica served it, as far as was known."""
    reported: bool
    """Whether it closed with a report."""


class ClosedRoutes:
    """The last `limit` closed routes by id and by prompt. As a container it holds the ids of those with a report."""

    def __init__(self, limit: int) -> None:
        self._routes = Bounded[str, Remembered](limit)
        self._by_prompt = Bounded[bytes, tuple[str, ...]](limit)

    def __contains__(self, route_id: object) -> bool:
        known = self._routes.get(route_id) if isinstance(route_id, str) else None
        return known is not None and known.reported

    def get(self, route_id: str | None) -> Remembered | None:
        """The route, if it is remembered."""
        return self._routes.get(route_id) if route_id is not None else None

    def add(self, route_id: str, prompt_key: bytes, remembered: Remembered) -> None:
        """The route has closed. Of one prompt the last SAME_PROMPT_REMEMBERED routes are found again."""
        self._routes[route_id] = remembered
        # A tuple: most prompts come once, and an empty deque alone takes more memory than all else that is remembered
        # of a route.
        same_prompt = (*(self._by_prompt.get(prompt_key) or ()), route_id)
        self._by_prompt[prompt_key] = same_prompt[-SAME_PROMPT_REMEMBERED:]

    def of_prompt(self, prompt_key: bytes) -> Iterator[Remembered | None]:
        """The last closed routes of the prompt; None for one that is forgotten."""
        return map(self._routes.get, self._by_prompt.get(prompt_key) or ())
