"""Formats numbers, times and names as terminal text, as the page does. None and what is no number show as a dash, never
as zero."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

DASH = "–"


def clean(value: object) -> str:
    """One line of printable text: a worker's or model's name must not move the cursor, turn the writing direction, or
    colour the rest."""
    if value is None:
        return DASH
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(value))


def count(value: Any) -> str:
    """Whole, with a comma between thousands."""
    return f"{value:,.0f}" if _is_number(value) else DASH


def decimal(value: Any) -> str:
    """With one digit behind the point, where that digit is not zero."""
    return f"{value:,.1f}".removesuffix(".0") if _is_number(value) else DASH


def percent(share: Any) -> str:
    """A share from 0 to 1 in percent; a share above 0 never shows as 0."""
    if not _is_number(share):
        return DASH
    value = share * 100
    if 0 < value < 0.1:
        return "<0.1 %"
    return f"{value:.{0 if value >= 99.95 or value == 0 else 1}f} %"


def seconds(value: Any) -> str:
    """Milliseconds below a second, seconds from there on."""
    if not _is_number(value):
        return DASH
    if value < 0.9995:
        return f"{value * 1000:.{1 if value < 0.0095 else 0}f} ms"
    return f"{value:.{2 if value < 10 else 1}f} s"


def duration(value: Any) -> str:
    """A time in seconds, with the largest unit that suits it."""
    if not _is_number(value):
        return DASH
    for limit, unit, name, digits in ((90, 1, "s", 0), (5_400, 60, "min", 0), (172_800, 3_600, "h", 1)):
        if value < limit:
            return f"{value / unit:.{digits}f} {name}"
    return f"{value / 86_400:.1f} days"


def time(unix: Any) -> str:
    """Unix seconds as local date and time."""
    try:
        return datetime.fromtimestamp(unix).strftime("%Y-%m-%d %H:%M:%S") if _is_number(unix) else DASH
    except (OverflowError, ValueError, OSError):
        return DASH  # a time that no calendar has


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
