"""The errors of the connector's bring-up, and of a load that must not go on. They have a module of their own so that
all others can import it."""

from __future__ import annotations


class Refused(RuntimeError):
    """A configuration that the connector cannot serve correctly, found at bring-up. The message names the setting and
    the remedy."""

    def __init__(self, setting: str, value: object, why: str, remedy: str) -> None:
        self.setting = setting
        self.value = value
        super().__init__(f"semkv connector: {setting} = {value!r}: {why}. Remedy: {remedy}.")


class LoadFailed(RuntimeError):
    """Promised KV cannot be put into the pages. Raised on purpose, never swallowed: the engine believes those tokens to
    be computed, and a forward pass over pages that nobody wrote would spread wrong KV through its reuse tree."""
