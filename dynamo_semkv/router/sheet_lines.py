"""The score sheet of one decision as its record keeps it: the lines that explain it, in whole tokens, under names that
people know."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_semkv.config.schema import KvRouterOptions
from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.route_events import MAX_SHEET_LINES, SheetLine
from dynamo_semkv.scoring.choose import ScoreRow, ScoreSheet
from dynamo_semkv.scoring.filters import FilteredBy

_KEPT_FROM_DYNAMO = (FilteredBy.NOT_ALLOWED, FilteredBy.LACKS_TAINT)
Named = Callable[[ReplicaKey], str]


def dynamo_choice(sheet: ScoreSheet, options: KvRouterOptions) -> ScoreRow | None:
    """The row that Dynamo's own router would choose, by its cost and the weights that it was given; of equal ones the
    first in the sheet. None: it may choose no replica. Dynamo may choose a replica that only our own filters (load,
    room, role) keep out."""
    free = [row for row in sheet.rows if row.filtered_by not in _KEPT_FROM_DYNAMO]
    return min(free, key=lambda row: dynamo_cost(row, options), default=None)


def dynamo_cost(row: ScoreRow, options: KvRouterOptions) -> float:
    """Dynamo's cost of a replica, in tokens; the lowest is chosen. Dynamo 1.6.1, lib/kv-router,
    `DefaultWorkerSelector`: what is left to prefill there, with a credit for each tier that holds part of the prompt,
    plus the KV blocks that running requests hold. Dynamo counts in blocks, this function in tokens."""
    view, at = row.view, row.situation
    queued = at.usual_queued if view.queued_prefill_tokens is None else view.queued_prefill_tokens
    credit = (
        options.overlap_score_credit * view.device_tokens
        + options.host_cache_hit_weight * view.host_tokens
        + options.disk_cache_hit_weight * view.disk_tokens
    )
    return max(0.0, queued + at.input_tokens - credit) + view.active_decode_blocks * at.block_size


def sheet_lines(sheet: ScoreSheet, dynamo: ScoreRow | None, named: Named) -> tuple[SheetLine, ...]:
    """The best rows first, at most `MAX_SHEET_LINES`. `dynamo`, the sheet's `dynamo_choice`, takes the place of the
    last line where it would be cut off."""
    rows = list(sheet.rows[:MAX_SHEET_LINES])
    if dynamo is not None and id(dynamo) not in map(id, rows):
        rows[-1] = dynamo
    return tuple([_line(row, named) for row in rows])


def _line(row: ScoreRow, named: Named) -> SheetLine:
    device, host, disk, donor, load, decode, *extra = [round(value) for value in row.values]
    return SheetLine(
        replica=named(row.replica),
        total=round(row.total),
        device=device,
        host=host,
        disk=disk,
        donor=donor,
        load=load,
        decode=decode,
        extra=sum(extra),
        filtered_by=row.filtered_by.value if row.filtered_by is not None else None,
    )
