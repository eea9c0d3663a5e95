"""DeviceBlocks: what one rank's device cache holds, in our own keys, as far as the engine's KV cache events say
(donors/kv_events.py).

An event names blocks by the engine's hash, which says nothing of model, layout or (as serialized) adapter and is never
recomputed here. It also carries their tokens, so the chain of *our* keys is built from those, in the namespace of the
event's salt and adapter where it names them. It is freshness, never authority: a wrong entry costs a donor its credit,
or leaves it some.

Layer groups: the one that attends furthest decides, because a group with a window gives up early blocks of a chain that
is alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_semkv.contracts.keys import BlockKey, child_key, root_key
from worker_connector.donors.kv_events import Scope
from worker_connector.engine_api.request_view import pack_tokens

DigestOf = Callable[["str | None", "int | None"], bytes]
"""(cache salt, adapter) of a request -> digest of its namespace"""


@dataclass(eq=False)
class DeviceBlock:
    """`key`, `parent`, `ordinal`, `tokens` never change."""

    key: BlockKey
    parent: DeviceBlock | None
    ordinal: int
    tokens: bytes
    names: set[str] = field(default_factory=set)
    """The engine's hashes of it: two scopes that the events do not tell apart may have one each."""
    level: int = 0
    """Of the engine's own caches; 0 is the device."""
    children: dict[BlockKey, DeviceBlock] = field(default_factory=dict)

    def chain(self) -> list[DeviceBlock]:
        """The blocks of its prefix, block 0 first, itself last."""
        path: list[DeviceBlock] = []
        at: DeviceBlock | None = self
        while at is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        return path


class DeviceBlocks:
    """Listens to `KvFreshness`, which has checked what it hands on. Not thread-safe. Bounded by what the device
    holds."""

    def __init__(self, digest_of: DigestOf) -> None:
        self._digest_of = digest_of
        self._widest: Scope | None = None
        self._by_key: dict[BlockKey, DeviceBlock] = {}
        self._by_name: dict[str, DeviceBlock] = {}
        self._new: list[DeviceBlock] = []
        self._gone: list[DeviceBlock] = []
        self._forgotten = self._cleared = False
        self._moved: list[DeviceBlock] = []
        self.counts: Counter[str] = Counter()
        """Blocks: `unmapped` (media, or behind such a block)."""

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: BlockKey) -> DeviceBlock | None:
        """Any thread may ask."""
        return self._by_key.get(key)

    def take_new(self) -> list[DeviceBlock]:
        """What was stored since the last call and is there still."""
        new, self._new = self._new, []
        return [block for block in new if self._by_key.get(block.key) is block]

    def take_cleared(self) -> bool:
        """Did an event since the last call say that nothing counts any more?"""
        cleared, self._cleared = self._cleared, False
        return cleared

    def take_forgotten(self) -> bool:
        """Was anything given up since the last call without being reported gone?"""
        forgotten, self._forgotten = self._forgotten, False
        return forgotten

    def take_gone(self) -> list[DeviceBlock]:
        """What left since the last call, deepest first."""
        gone, self._gone = self._gone, []
        return gone

    def take_moved(self) -> list[DeviceBlock]:
        """What went to another cache level, or came back, since the last call."""
        moved, self._moved = self._moved, []
        return moved

    def clear(self) -> None:
        """Forgets every block; nobody is told."""
        self._new.clear()
        self._moved.clear()
        self._by_key.clear()
        self._by_name.clear()
        self._gone.clear()
        self._widest = None

    # from KvFreshness

    def stored(self, scope: Scope, parent: str | None, blocks: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Consecutive whole blocks that continue `parent` became reusable. A token is an integer, or as the serializer
        spells it."""
        if not self._decides(scope):
            return
        above = None if parent is None else self._by_name.get(parent)
        for index, (name, block) in enumerate(blocks):
            tokens = _plain_tokens(block)
            if tokens is None or (above is None and (parent is not None or index > 0)):
                self.counts["unmapped"] += len(blocks) - index
                return
            start = root_key(self._digest_of(_salt(block), block.get("lora_id"))) if above is None else above.key
            above = self._enter(name, above, child_key(start, tokens), tokens)
            above.level = block.get("cache_level") or 0

    def removed(self, scope: Scope, names: Sequence[str]) -> None:
        """Blocks of this scope left the engine's cache."""
        if self._decides(scope):
            for name in names:
                self._remove(name)

    def cleared(self) -> None:
        """The engine's cache is empty."""
        self.clear()
        self._cleared = True

    def moved(self, scope: Scope, name: str, level: int) -> None:
        """A block went to another cache level of the engine."""
        block = self._by_name.get(name)
        if block is not None and self._decides(scope) and block.level != level:
            block.level = level
            self._moved.append(block)

    # inside

    def _decides(self, scope: Scope) -> bool:
        if self._widest is None or _reach(scope) > _reach(self._widest):
            if self._widest is not None:
                self._forget_all()
            self._widest = scope
        return scope == self._widest

    def _forget_all(self) -> None:
        """A group that attends further spoke up: what the narrower one said does not decide. Nothing is reported gone
        by that."""
        self._forgotten = bool(self._by_key)
        self._by_key.clear()
        self._by_name.clear()

    def _enter(self, name: str, above: DeviceBlock | None, key: BlockKey, tokens: bytes) -> DeviceBlock:
        block = self._by_key.get(key)
        if block is None:
            block = DeviceBlock(key, above, 0 if above is None else above.ordinal + 1, tokens)
            self._by_key[key] = block
            if above is not None:
                above.children[key] = block
            self._new.append(block)
        block.names.add(name)
        self._by_name[name] = block
        return block

    def _remove(self, name: str) -> None:
        block = self._by_name.pop(name, None)
        if block is None:
            return
        block.names.discard(name)
        if block.names:
            return
        subtree = [block]
        for node in subtree:
            subtree.extend(node.children.values())
        for node in reversed(subtree):
            for other in node.names:
                self._by_name.pop(other, None)
            self._by_key.pop(node.key, None)
            if node.parent is not None:
                node.parent.children.pop(node.key, None)
            self._gone.append(node)


def _reach(scope: Scope) -> float:
    return float("inf") if scope.window is None else float(scope.window)


def _salt(block: Mapping[str, Any]) -> str | None:
    salt = block.get("cache_salt")
    return salt if isinstance(salt, str) else None


def _plain_tokens(block: Mapping[str, Any]) -> bytes | None:
    """None for a block with media in it: which media is not a matter of tokens alone."""
    if block.get("mm_keys"):
        return None
    words = []
    for token in block["tokens"]:
        if isinstance(token, int):
            words.append(token)
            continue
        if isinstance(token, str):
            return None
        if not isinstance(token["token_id"], int) or token.get("token_extra_id"):
            return None
        words.append(token["token_id"])
    return pack_tokens(words)
