"""The one error of the wire contracts. It lives alone so that every contract module can import it without a loop."""

from __future__ import annotations


class ContractError(ValueError):
    """A message or value breaks a contract. Carries the field, the value and what is allowed.

    The value is shown as given unless `secret` is set; salts and token ids are always passed with `secret=True`.
    """

    def __init__(self, field: str, value: object, allowed: str, *, secret: bool = False) -> None:
        self.field = field
        self.value = "<redacted>" if secret else value
        self.allowed = allowed
        shown = repr(self.value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")
