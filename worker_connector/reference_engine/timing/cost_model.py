"""What work takes on a GPU: a roofline of matrix units and memory, and a fixed part a pass. Pure.

A token is multiplied with every parameter (two operations each) and attends to its context (four operations for each
head element and layer of each token before it). A pass reads the weights once and the KV of every context in it. It
takes as long as the slower of the two, and the fixed part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from worker_connector.reference_engine.timing.profile import GpuProfile


@dataclass(frozen=True)
class Rows:
    """One sequence's part of a pass: `tokens` positions from `start` on."""

    start: int
    tokens: int


class CostModel:
    """`slower`: every time is multiplied by it, so that a machine with few cores keeps up."""

    def __init__(self, profile: GpuProfile, slower: float = 1.0) -> None:
        if not 0 < slower < math.inf:
            raise ValueError(f"slower is {slower}; it must be positive and finite")
        self.profile = profile
        self.slower = slower
        #: The fixed part of a pass.
        self.host_seconds = profile.pass_overhead_seconds * slower
        self._token_flops = 2 * profile.parameters
        self._context_flops = 4 * profile.layers * profile.heads * profile.head_dim
        self._flops_per_second = profile.flops_per_second * profile.flops_utilisation
        self._bytes_per_second = profile.memory_bytes_per_second * profile.memory_utilisation
        self._bus_bytes_per_second = profile.bus_bytes_per_second * profile.bus_utilisation

    def pass_seconds(self, batch: Iterable[Rows]) -> float:
        """The time of one forward pass; 0.0 for an empty one."""
        flops, read, some = 0.0, self.profile.weight_bytes, False
        for rows in batch:
            some = True
            end = rows.start + rows.tokens
            # Token i of the sequence attends to i + 1 tokens, itself among them.
            attended = (rows.start + 1 + end) * rows.tokens / 2
            flops += self._token_flops * rows.tokens + self._context_flops * attended
            read += self.profile.kv_bytes_per_token * end
        if not some:
            return 0.0
        busy = max(flops / self._flops_per_second, read / self._bytes_per_second)
        return self.host_seconds + busy * self.slower

    def copy_seconds(self, tokens: int) -> float:
        """The time that the KV of so many tokens is on the bus."""
        return tokens * self.profile.kv_bytes_per_token / self._bus_bytes_per_second * self.slower
