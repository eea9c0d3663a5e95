"""Where KV lives: a tier on a worker's rank, or a shared store. The emitter of an event and the place of the KV
differ."""

from __future__ import annotations

from enum import Enum

import msgspec


class Tier(str, Enum):
    """Storage tiers, named as Dynamo's StorageTier (ai-dynamo/dynamo#10127)."""

    DEVICE = "device"
    HOST_PINNED = "host_pinned"
    DISK = "disk"
    EXTERNAL = "external"


KV_EVENT_MEDIUM: dict[Tier, str] = {
    Tier.DEVICE: "GPU",
    Tier.HOST_PINNED: "CPU_PINNED",
    Tier.DISK: "DISK",
    Tier.EXTERNAL: "EXTERNAL",
}
"""What Dynamo's KV events call the tiers."""


class WorkerLocation(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="worker"):
    """In the memory, or on the disk, of one rank of a worker."""

    worker_id: int
    dp_rank: int
    tier: Tier


class SharedLocation(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="shared"):
    """In a store that several workers read."""

    backend: str
    tier: Tier
    locator: str


Location = WorkerLocation | SharedLocation
