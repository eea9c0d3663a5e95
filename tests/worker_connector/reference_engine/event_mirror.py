"""A consumer of KV events that checks each one against what came before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Mirror:
    """What a consumer of the events believes is cached: block hash -> parent hash."""

    block_size: int
    blocks: dict[int, int | None] = field(default_factory=dict)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    next_id: int = 0

    def apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            assert event["event_id"] == self.next_id
            self.next_id += 1
            data = event["data"]
            if data["type"] == "stored":
                parent = data["parent_hash"]
                assert parent is None or parent in self.blocks
                for block in data["blocks"]:
                    assert block["block_hash"] not in self.blocks
                    assert len(block["tokens"]) == self.block_size
                    self.blocks[block["block_hash"]] = parent
                    self.tokens[block["block_hash"]] = tuple(t["token_id"] for t in block["tokens"])
                    parent = block["block_hash"]
            elif data["type"] == "removed":
                for block_hash in data["block_hashes"]:
                    del self.blocks[block_hash]

    def chain(self, block_hash: int) -> tuple[int, ...]:
        parent = self.blocks[block_hash]
        return (() if parent is None else self.chain(parent)) + self.tokens[block_hash]
