"""What every section of the configuration is made of: its base, and the kinds of values that several of them have."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from dynamo_semkv.config import forms
from dynamo_semkv.config.limits import check_limits

MIB = 1024 * 1024
GIB = 1024 * MIB

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
"""A Dynamo namespace, component or endpoint name."""
Text = Annotated[str, Meta(min_length=1, max_length=1024, extra=forms.extra(forms.TEXT))]
FilePath = Annotated[str, Meta(min_length=1, max_length=1024, extra=forms.extra(forms.PATH))]
"""Of a file or directory, as the operating system takes it; a relative one from where the process was started."""
Host = Annotated[str, Meta(min_length=1, max_length=253, extra=forms.extra(forms.HOST))]
Address = Annotated[str, Meta(min_length=1, max_length=64, extra=forms.extra(forms.ADDRESS))]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Seconds = Annotated[float, Meta(ge=0.01, le=30 * 86_400.0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One mapping of the file. Raises ContractError with the full path for a value outside its limits."""

    PATH: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_limits(self.PATH, self)
