"""Every field of the configuration by its dotted path, and a configuration that sets one of them."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_semkv.config.limits import Limits, limits_of
from dynamo_semkv.config.schema import Config


def leaves(kind: type[msgspec.Struct] = Config, path: str = "") -> list[tuple[str, Limits]]:
    """`(path, limits)` of each field that is no section itself."""
    found: list[tuple[str, Limits]] = []
    for name, limits in limits_of(kind).items():
        here = f"{path}.{name}" if path else name
        found += leaves(limits.kind, here) if issubclass(limits.kind, msgspec.Struct) else [(here, limits)]
    return found


def nest(path: str, value: object) -> dict[str, Any]:
    """`{"a": {"b": value}}` of the path `a.b`."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value
