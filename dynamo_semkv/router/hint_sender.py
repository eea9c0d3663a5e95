"""The out-of-band way of a hint: a HintDelivery to the connector of one replica over the bus, which does not store it.

An engine behind dynamo.trtllm sees nothing of a request's `extra_args`; its connector finds the hint by hashing the
request's tokens.
"""

from __future__ import annotations

from dynamo_semkv.bus.publishing import Publisher
from dynamo_semkv.contracts import subjects
from dynamo_semkv.contracts.codec import MSGPACK, encode_hint_delivery
from dynamo_semkv.contracts.hints import HINT_DELIVERY_VERSION, HintDelivery, KvHintsEnvelope
from dynamo_semkv.contracts.identity import StableReplica
from dynamo_semkv.contracts.keys import PromptKey


class HintSender:
    """Publishes hints on the subject of the replica that each is meant for."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def send(
        self, replica: StableReplica, prompt_key: PromptKey, envelope: KvHintsEnvelope, traceparent: str | None = None
    ) -> bool:
        """False when the bus did not take the hint (broker away, or buffer full). Never waits."""
        delivery = HintDelivery(
            version=HINT_DELIVERY_VERSION,
            stable_routing_id=replica.stable_routing_id,
            dp_rank=replica.dp_rank,
            prompt_key=prompt_key,
            envelope=envelope,
            traceparent=traceparent,
        )
        return self._publisher.publish(
            subjects.hints(replica), encode_hint_delivery(delivery), content_type=MSGPACK, persistent=False
        )
