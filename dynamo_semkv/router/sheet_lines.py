"""The score sheet of one decision as its record keeps it: the lines that explain it, in whole tokens, by the names that people know."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.route_events import MAX_SHEET_LINES, SheetLine
from dynamo_semkv.scoring.choose import ScoreRow, ScoreSheet

Named = Callable[[ReplicaKey], str]


def dynamo_choice(sheet: ScoreSheet) -> ScoreRow | None:
    """The best row by exact device overlap and load alone; of equal ones the first in the sheet. None: no replica may be chosen."""
    free = [row for row in sheet.rows if row.filtered_by is None]
    best, most = None, 0.0
    for row in free:
        device, _, _, _, load, *_ = row.values  # in the order of SCORERS
        if best is None or device + load > most:
            best, most = row, device + load
    return best


def sheet_lines(sheet: ScoreSheet, dynamo: ScoreRow | None, named: Named) -> tuple[SheetLine, ...]:
    """Best first, at most `MAX_SHEET_LINES`; `dynamo`, its `dynamo_choice`, takes the place of the last one where it would be cut off."""
    rows = list(sheet.rows[:MAX_SHEET_LINES])
    if dynamo is not None and id(dynamo) not in map(id, rows):
        rows[-1] = dynamo
    return tuple([_line(row, named) for row in rows])


def _line(row: ScoreRow, named: Named) -> SheetLine:
    device, host, disk, donor, load, *extra = [round(value) for value in row.values]
    return SheetLine(
        replica=named(row.replica),
        total=round(row.total),
        device=device,
        host=host,
        disk=disk,
        donor=donor,
        load=load,
        extra=sum(extra),
        filtered_by=row.filtered_by.value if row.filtered_by is not None else None,
    )
