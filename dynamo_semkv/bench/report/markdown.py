"""Figures as text of a Markdown page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_semkv.bench.report.statistics import Figure

NOTHING = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    lines = [_row(head), _row(rule), *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def spread(figure: Figure | None, scale: float = 1.0, digits: int = 2) -> str:
    """`median (low to high)`; only the median where all repeats agree at these digits or there is one."""
    if figure is None:
        return NOTHING
    middle, low, high = (number(value * scale, digits) for value in (figure.median, figure.low, figure.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def milliseconds(figure: Figure | None) -> str:
    """Seconds as milliseconds, with fewer digits for larger values; a dash without a figure."""
    if figure is None:
        return NOTHING
    return spread(figure, 1e3, 0 if figure.median >= 0.1 else 1 if figure.median >= 0.01 else 2)


def percent(figure: Figure | None) -> str:
    """The median of a share in percent; a dash without a figure."""
    return (
        NOTHING if figure is None else f"{figure.median:.0%}" if figure.median in (0.0, 1.0) else f"{figure.median:.1%}"
    )


def number(value: float, digits: int = 2) -> str:
    """With thousands separators."""
    return f"{value:,.{digits}f}"


def counts(reasons: dict[str, int] | None) -> str:
    """`reason count, ...`; a dash without any."""
    return ", ".join(f"{reason} {count}" for reason, count in (reasons or {}).items()) or NOTHING
