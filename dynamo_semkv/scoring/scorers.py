"""Scorers: plain callables from a replica to [0, 1], without weights. They explain a row; the sum is made of token
values."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynamo_semkv.contracts.evidence import SemanticTrtMatch
from dynamo_semkv.scoring.replica_view import ReplicaView


class Situation(msgspec.Struct, frozen=True):
    """What the scorers of one request share."""

    input_tokens: int
    least_queued: float
    """Prefill tokens queued on the idlest replica that may be chosen."""
    usual_queued: float
    """Mean over the replicas whose queue is known: what an unknown queue counts as."""
    least_active: int = 0
    """KV blocks that running requests hold on the replica with the fewest of those that may be chosen."""
    block_size: int = 0
    """Tokens in a block; 0: unknown, and blocks cost nothing."""

    def excess(self, view: ReplicaView) -> float:
        """Queued prefill tokens above the idlest replica."""
        queued = self.usual_queued if view.queued_prefill_tokens is None else view.queued_prefill_tokens
        return max(0.0, queued - self.least_queued)

    def excess_active(self, view: ReplicaView) -> int:
        """Tokens of KV that running requests hold on it above the replica with the fewest."""
        return max(0, view.active_decode_blocks - self.least_active) * self.block_size


Scorer = Callable[[ReplicaView, SemanticTrtMatch | None, Situation], float]


def device(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """Share of the prompt that is an exact prefix on the device."""
    return _share(view.device_tokens, at)


def host(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """Share of the prompt that the host tier adds to that prefix."""
    return _share(view.host_tokens, at)


def disk(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """Share of the prompt that the disk tier adds to both."""
    return _share(view.disk_tokens, at)


def donor(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """Share of the prompt that the replica's best donor claims."""
    return _share(match.reusable_token_count, at) if match is not None else 0.0


def load(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """1 on the idlest replica, one half where as much waits above that as the prompt is long."""
    return 1.0 / (1.0 + at.excess(view) / max(1, at.input_tokens))


def decode(view: ReplicaView, match: SemanticTrtMatch | None, at: Situation) -> float:
    """As `load`, of the KV that running requests hold: each of their steps reads it, and a new request waits for
    theirs."""
    return 1.0 / (1.0 + at.excess_active(view) / max(1, at.input_tokens))


SCORERS: dict[str, Scorer] = {
    "device": device,
    "host": host,
    "disk": disk,
    "donor": donor,
    "load": load,
    "decode": decode,
}


def _share(tokens: int, at: Situation) -> float:
    return min(1.0, tokens / at.input_tokens) if at.input_tokens > 0 else 0.0
