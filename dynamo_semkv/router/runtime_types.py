"""What the router service sees of Dynamo: plain data, and the Protocols of the edge. No Dynamo type is used here.

`DynamoEdge` (runtime.py) implements `Edge`; the fakes of the unit tests do too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.keys import TokenArray

Request = dict[str, Any]
"""A preprocessed request as the frontend sends it (token_ids, sampling_options, routing, extra_args, ...)."""
Chunk = dict[str, Any]
"""One response frame of a worker (token_ids, finish_reason, engine_data, completion_usage, routing_data, ...)."""


class RankOverlap(NamedTuple):
    """Exact prefix blocks of a prompt that Dynamo's index holds for one replica.

    `host_pinned_extension` and `disk_extension` count blocks beyond the device prefix (then beyond the host prefix);
    they are not Dynamo's cumulative `host_pinned_blocks` and `disk_blocks`.
    """

    device: int
    host_pinned_extension: int
    disk_extension: int

    @property
    def total(self) -> int:
        """Blocks of all tiers together."""
        return self.device + self.host_pinned_extension + self.disk_extension


class Overlap(msgspec.Struct, frozen=True):
    """Exact overlap of one prompt with the replicas that Dynamo knows. Blocks are full blocks of `block_size`
    tokens."""

    block_size: int
    prompt_blocks: int
    ranks: Mapping[ReplicaKey, RankOverlap]
    """A replica that holds nothing of the prompt need not be in it."""


class RankLoad(NamedTuple):
    """The load of one replica by Dynamo's own bookings (of this router process, and of those it is synchronized
    with)."""

    prefill_tokens: int
    """Tokens of prompts that are not computed yet."""
    decode_blocks: int
    """Blocks of all prompts, computed or not, each shared block once."""
    active_requests: int


NOTHING = RankOverlap(0, 0, 0)
"""The overlap of a replica that holds nothing of a prompt."""


class Exact(msgspec.Struct, frozen=True):
    """What Dynamo says that the replicas hold of the prompt, and how loaded they are."""

    overlap: Overlap
    loads: Mapping[ReplicaKey, RankLoad]

    def of(self, replica: ReplicaKey) -> RankOverlap:
        """The replica's overlap; zeros where Dynamo lists none."""
        return self.overlap.ranks.get(replica, NOTHING)


class WorkerRole(str, Enum):
    """Which part of a request a worker does, as its model card says (`worker_type`). Closed: any other word is
    UNKNOWN."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    """Computes the prompt and hands its KV over; the one token that it generates does not count."""
    DECODE = "decode"
    ENCODE = "encode"
    UNKNOWN = "unknown"
    """The card does not say: nothing follows from it."""


@dataclass(frozen=True)
class ReplicaCard:
    """Facts of one replica from its worker's model card. `total_kv_blocks` is per rank."""

    model: str
    source_path: str
    block_size: int
    data_parallel_size: int
    data_parallel_start_rank: int
    stable_routing_id: str | None
    total_kv_blocks: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    context_length: int | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    runtime_data: Mapping[str, Any] = field(default_factory=dict)
    role: WorkerRole = WorkerRole.UNKNOWN
    taints: frozenset[str] = frozenset()
    """The taints that a request's `routing_constraints` may require; Dynamo adds those of the topology
    (`dynamo.topology/...`) itself."""


class Choice(NamedTuple):
    """What Dynamo's KvRouter would choose for a prompt, without booking it."""

    replica: ReplicaKey
    overlap_blocks: int


class CallContext(msgspec.Struct, frozen=True):
    """One call of one of our endpoints.

    `request_id` is the frontend's (`chatcmpl-<id>`); it is the same for every migration attempt, so it is no attempt
    id. Dynamo gives the worker another id. `metadata` are the client's `x-dynamo-meta-*` headers.
    """

    request_id: str
    metadata: Mapping[str, str]
    traceparent: str | None
    is_stopped: Callable[[], bool]
    send: Callable[[Chunk], None] | None = None
    """Where the chunks go, for a handler that sends them itself and yields none: a generator between Dynamo's stream
    and its client costs two more turns of the event loop for each chunk. RuntimeError: the client has gone."""


class ChunkStream(Protocol):
    """The stream of one answer, as KvRouter returns it: an async iterator of chunks."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """The stream itself."""
        ...

    def __anext__(self) -> Awaitable[Chunk]:
        """StopAsyncIteration at the end; any other exception is a failure (runtime_errors.py)."""
        ...


class Dispatch(Protocol):
    """One request on its way through KvRouter: `first`, then `next` until there is none, then `close`.

    Facts are filled in as they become known: `replica` with the first chunk, the rest at the end.
    """

    replica: ReplicaKey | None
    """Which replica served, as KvRouter reported it. None until the first chunk."""
    pinned: bool
    """Whether the attempt that served was pinned by us."""
    fallback: str | None
    """Why the pin was given up and Dynamo chose (the value of a `FailureKind`); None when the pin held or none was
    asked."""
    chunks: int
    finish_reason: str | None
    engine_data: Mapping[str, Any] | None
    """The worker's own engine_data of the last chunk that had any, as it sent it."""
    usage: Mapping[str, Any] | None
    timing: Mapping[str, Any] | None

    async def first(self) -> Chunk | None:
        """Sends the request and returns the first chunk; None: an empty answer. Raises RequestFailed."""
        ...

    async def next(self) -> Chunk | None:
        """The next chunk; None: there are no more. Raises RequestFailed."""
        ...

    async def close(self) -> None:
        """Gives the stream back, at whatever point."""
        ...


class Handler(Protocol):
    """One of our endpoints: takes a request and yields chunks. Raises `RequestFailed`, or passes on the one that its
    dispatch raised."""

    def __call__(self, request: Request, call: CallContext) -> AsyncIterator[Chunk]:
        """Called once for each request; the caller iterates to the end or closes the iterator."""
        ...


class Edge(Protocol):
    """Dynamo, as the router service uses it. Token ids are ints (`token_ids_list`); packed bytes are refused."""

    def live_replicas(self) -> Mapping[ReplicaKey, ReplicaCard]:
        """Replicas that may be pinned, from discovery and the model cards. It may return the same object while nothing
        changed."""
        ...

    async def loads(self) -> Mapping[ReplicaKey, RankLoad]:
        """The present load per replica, without a further prompt."""
        ...

    async def exact(
        self, token_ids: Sequence[int], cache_namespace: str | None = None, lora_name: str | None = None
    ) -> tuple[Overlap, Mapping[ReplicaKey, RankLoad]]:
        """Exact overlap, and `loads`, asked at once. `cache_namespace` is the request's `routing.cache_salt`."""
        ...

    async def best_choice(
        self,
        token_ids: Sequence[int],
        cache_namespace: str | None = None,
        lora_name: str | None = None,
        required_taints: Collection[str] = (),
    ) -> Choice:
        """Dynamo's own choice for a prompt, without a booking. RequestFailed(NO_WORKER) when there is none."""
        ...

    def dispatch(
        self,
        request: Request,
        pin: ReplicaKey | None,
        *,
        unpinned: Request | None = None,
        annotate: Mapping[str, Any] | None = None,
        tokens: TokenArray | None = None,
    ) -> Dispatch:
        """Prepares the request, for `pin` or for Dynamo's choice; it is sent by `first`. `unpinned`: the request to
        send when the pin is given up. `annotate`: goes to the client in `engine_data.semkv`. `tokens`: the prompt as an
        array, sent instead."""
        ...


RouteCallback = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""An engine route of the status server: JSON body in, JSON body out."""
