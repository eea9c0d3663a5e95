"""Limits in field annotations, read once per type: what check and error text both come from."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from dynamo_semkv.config.forms import Form
from dynamo_semkv.contracts.errors import ContractError

_SCALARS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


class Limits(msgspec.Struct, frozen=True):
    """One field: its plain type, whether null is allowed, and its `Meta`, whose `extra` may hold a form (forms.py)."""

    kind: type
    optional: bool
    meta: Meta

    @property
    def form(self) -> Form | None:
        """The form that a text must have; None where any text will do."""
        return (self.meta.extra or {}).get("form")

    def allowed(self) -> str:
        """For error texts: `a number in [0.1, 1000.0]`."""
        if issubclass(self.kind, Enum):
            text = ", ".join(str(member.value) for member in self.kind)
        elif issubclass(self.kind, msgspec.Struct):
            text = "a mapping with the keys " + ", ".join(self.kind.__struct_fields__)
        else:
            text = self.form.allowed if self.form is not None else _SCALARS[self.kind]
        meta = self.meta
        if meta.ge is not None or meta.le is not None:
            text += f" in [{meta.ge}, {meta.le}]"
        if meta.pattern is not None:
            text += f" of the form {meta.pattern}"
        if meta.min_length is not None or meta.max_length is not None:
            text += f"{',' if self.form else ''} of {meta.min_length or 0} to {meta.max_length} characters"
        return text + (", or null" if self.optional else "")

    def fault(self, path: str, value: object) -> ContractError | None:
        """Why the field at this path cannot have this value; None if it can."""
        if not self.accepts(value):
            return ContractError(path, value, self.allowed())
        wrong = self.form.wrong(value) if self.form is not None and isinstance(value, str) else None
        return None if wrong is None else ContractError(path, wrong, self.allowed())

    def accepts(self, value: object) -> bool:
        """As far as type, range, length and pattern say."""
        if value is None:
            return self.optional
        if self.kind is float:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
                return False
        elif self.kind is int:
            if isinstance(value, bool) or not isinstance(value, int):
                return False
        elif not isinstance(value, self.kind):
            return False
        meta = self.meta
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return (meta.ge is None or value >= meta.ge) and (meta.le is None or value <= meta.le)
        if isinstance(value, str) and not isinstance(value, Enum):
            fits = (meta.min_length or 0) <= len(value) and (meta.max_length is None or len(value) <= meta.max_length)
            return fits and (meta.pattern is None or re.fullmatch(meta.pattern, value) is not None)
        return True


@cache
def limits_of(section: type[msgspec.Struct]) -> dict[str, Limits]:
    """Field name -> limits, in declaration order."""
    hints = get_type_hints(section, include_extras=True)
    return {name: _limits(hints[name]) for name in section.__struct_fields__}


def _limits(annotation: Any) -> Limits:
    optional, meta = False, Meta()
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *extras = get_args(annotation)
            meta = next((extra for extra in extras if isinstance(extra, Meta)), meta)
        elif type(None) in get_args(annotation):
            optional = True
            (annotation,) = (part for part in get_args(annotation) if part is not type(None))
        else:
            return Limits(annotation, optional, meta)


def check_limits(path: str, section: msgspec.Struct) -> None:
    """Raises ContractError with the full path for the first field whose value is not allowed."""
    for name, limits in limits_of(type(section)).items():
        fault = limits.fault(f"{path}.{name}" if path else name, getattr(section, name))
        if fault is not None:
            raise fault


__all__ = ["Limits", "check_limits", "limits_of"]
