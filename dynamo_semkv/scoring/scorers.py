"""Scorers: plain callables from a replica to [0, 1], without weights. They explain a row; the sum is made of token values."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.scoring.candidate import ReplicaView


class Situation(msgspec.Struct, frozen=True):
    """What the scorers of one request share."""

    input_tokens: int
    least_queued: float
    """Prefill tokens queued on the idlest replica that may be chosen."""
    usual_queued: float
    """Mean over the replicas whose queue is known: what an unknown queue counts as."""

    def excess(self, view: ReplicaView) -> float:
        """Queued prefill tokens above the idlest replica."""
        queued = self.usual_queued if view.queued_prefill_tokens is None else view.queued_prefill_tokens
        return max(0.0, queued - self.least_queued)


Scorer = Callable[[ReplicaView, SemanticTrtMatch | None, Situation], float]


def device(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    return _share(view.device_tokens, at)


def host(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    return _share(view.host_tokens, at)


def disk(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    return _share(view.disk_tokens, at)


def donor(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """Share of the prompt that the replica's best donor claims."""
    return _share(match.reusable_token_count, at) if match is not None else 0.0


def load(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """1 on the idlest replica, one half where as much waits above that as the prompt is long."""
    return 1.0 / (1.0 + at.excess(view) / max(1, at.input_tokens))


SCORERS: dict[str, Scorer] = {"device": device, "host": host, "disk": disk, "donor": donor, "load": load}


def _share(tokens: int, at: Situation) -> float:
    return min(1.0, tokens / at.input_tokens) if at.input_tokens > 0 else 0.0
