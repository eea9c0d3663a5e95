"""ReplicaView: what is known of one live replica at the moment of a decision."""

from __future__ import annotations

import msgspec

from dynamo_semkv.config.schema import Materialization
from dynamo_semkv.contracts.errors import ContractError
from dynamo_semkv.contracts.identity import ReplicaKey, StableReplica


class ReplicaView(msgspec.Struct, frozen=True):
    """All token counts are tokens of this prompt, except the queue. Raises ContractError for a negative count. A
    Struct, because every request makes one for every replica: a frozen dataclass takes five times as long."""

    replica: ReplicaKey
    stable: StableReplica | None = None
    device_tokens: int = 0
    """Exact prefix on the device."""
    host_tokens: int = 0
    """What the host tier adds beyond that."""
    disk_tokens: int = 0
    """What the disk tier adds beyond both."""
    queued_prefill_tokens: int | None = None
    """Prefill tokens that wait on the replica already. None: unknown, which is neither idle nor busy."""
    active_decode_blocks: int = 0
    total_blocks: int = 0
    """KV blocks of the replica; 0: unknown."""
    needed_blocks: int = 0
    """KV blocks that this prompt takes beyond those that the device has of it."""
    overloaded: bool = False
    mode: Materialization = Materialization.EXACT
    """Of its connector, as it announced it."""
    wrong_role: bool = False
    """The worker does not do what this router places: it decodes, say, and the prompt is computed elsewhere."""
    not_allowed: bool = False
    """The request names the workers it may go to, and this is none of them."""
    lacks_taint: bool = False
    """The request requires a taint that the worker does not have."""

    def __post_init__(self) -> None:
        least = min(
            self.device_tokens, self.host_tokens, self.disk_tokens, self.active_decode_blocks, self.total_blocks
        )
        if least < 0:
            counts = ("device_tokens", "host_tokens", "disk_tokens", "active_decode_blocks", "total_blocks")
            name = next(name for name in counts if getattr(self, name) < 0)
            raise ContractError(f"replica_view.{name}", getattr(self, name), "0 or more")
        if self.queued_prefill_tokens is not None and self.queued_prefill_tokens < 0:
            raise ContractError("replica_view.queued_prefill_tokens", self.queued_prefill_tokens, "0 or more, or None")

    @property
    def exact_tokens(self) -> int:
        """Exact prefix over all tiers, as Dynamo's index has it."""
        return self.device_tokens + self.host_tokens + self.disk_tokens
