"""From a plan and the engine's first report to the order that the ranks get."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_semkv.contracts.evidence import Bucket, SemanticTrtBlockRef
from dynamo_semkv.contracts.identity import Generation
from dynamo_semkv.contracts.load_plan import ExpectedMode, SemanticTrtLoadPlan
from worker_connector.engine_api.pages import NO_PAGE, PageTable
from worker_connector.errors import LoadFailed
from worker_connector.link.metadata import LoadOrder
from worker_connector.memory.transfer import Move
from worker_connector.requests.attempt import Attempt


def load_order(
    attempt: Attempt,
    pages: PageTable,
    windows: Sequence[int | None],
    computed: int,
    position: int,
    iteration: int,
    generation: Generation,
) -> LoadOrder | None:
    """Sends the attempt's plan: None when the engine honours nothing of it.

    Raises LoadFailed when a page that must be filled is not there: a block of the honoured prefix without a page in a
    full-attention group, or one whose pages were not reported. Blocks that a window has passed have no page and need
    none.
    """
    plan = attempt.plan
    assert plan is not None
    ordinals = plan.send(computed, position, iteration)
    if not plan.copying:
        return None
    spans = pages.span(ordinals.start, ordinals.stop)
    for ordinal, slots in zip(ordinals, spans, strict=False):
        if NO_PAGE in slots and any(s == NO_PAGE and w is None for s, w in zip(slots, windows, strict=True)):
            raise _no_page(attempt, ordinal)
    if len(spans) < len(ordinals):
        raise _no_page(attempt, ordinals.start + len(spans))
    blocks = plan.path[ordinals.start : ordinals.stop]
    moves = tuple(map(Move, [block.slot for block in blocks], spans))
    hint = attempt.hints.donor if attempt.hints is not None else None
    return LoadOrder(
        key=attempt.key,
        moves=moves,
        plan=SemanticTrtLoadPlan(
            request_id=attempt.key.request_id,
            epoch=attempt.key.epoch,
            route_id=hint.route_id if hint is not None else None,
            donor_id=hint.donor_id if hint is not None else "",
            provider_generation=generation,
            cache_namespace=attempt.digest.hex(),
            expected_mode=ExpectedMode.EXACT_EQUIVALENT,
            first_ordinal=ordinals.start,
            target_block_ids=tuple(move.pages[0] for move in moves),
            donor_block_refs=tuple(SemanticTrtBlockRef(block_key=block.key, ordinal=block.ordinal) for block in blocks),
            token_count=plan.honoured,
            semantic_score_bucket=(hint.score_bucket if hint is not None else Bucket.NONE).value,
        ),
    )


def _no_page(attempt: Attempt, ordinal: int) -> LoadFailed:
    return LoadFailed(f"request {attempt.key.request_id}: block {ordinal} of the served prefix has no page")
