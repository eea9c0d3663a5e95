"""The score sheet of one decision as its record keeps it: the lines that explain it, in whole tokens, by the names that people know."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_semkv.contracts.identity import ReplicaKey
from dynamo_semkv.contracts.route_events import MAX_SHEET_LINES, SheetLine
from dynamo_semkv.scoring.choose import ScoreRow, ScoreSheet
from dynamo_semkv.scoring.scorers import SCORERS

Named = Callable[[ReplicaKey], str]


def dynamo_choice(sheet: ScoreSheet) -> ScoreRow | None:
    """The best row by exact device overlap and load alone; of equal ones the first in the sheet. None: no replica may be chosen."""
    free = [row for row in sheet.rows if row.filtered_by is None]
    return max(free, key=_without_us, default=None)


_DEVICE, _LOAD = (list(SCORERS).index(name) for name in ("device", "load"))


def _without_us(row: ScoreRow) -> float:
    return row.values[_DEVICE] + row.values[_LOAD]


def sheet_lines(sheet: ScoreSheet, dynamo: ScoreRow | None, named: Named) -> tuple[SheetLine, ...]:
    """Best first, at most `MAX_SHEET_LINES`; `dynamo`, its `dynamo_choice`, takes the place of the last one where it would be cut off."""
    rows = list(sheet.rows[:MAX_SHEET_LINES])
    if dynamo is not None and all(row is not dynamo for row in rows):
        rows[-1] = dynamo
    return tuple(_line(row, named) for row in rows)


def _line(row: ScoreRow, named: Named) -> SheetLine:
    values = [round(value) for value in row.values]
    return SheetLine(
        replica=named(row.replica),
        total=round(row.total),
        extra=sum(values[len(SCORERS) :]),
        filtered_by=row.filtered_by.value if row.filtered_by is not None else None,
        **dict(zip(SCORERS, values, strict=False)),
    )
