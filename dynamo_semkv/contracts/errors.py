"""The one error of the wire contracts. It lives alone so that every contract module can import it without a loop."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence


class _Bounded(reprlib.Repr):
    """`repr`, except that containers end after some elements and levels (one that holds itself, or shares its parts,
    may be endless when written out) and that integers may be of any size (Python refuses to write long ones)."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 8

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 1024 else f"<an integer of {x.bit_length()} bits>"

    def repr_str(self, x: str, level: int) -> str:
        return repr(x[:160])

    def repr_instance(self, x: object, level: int) -> str:
        return repr(x)


_BOUNDED = _Bounded()


class ContractError(ValueError):
    """A message or value breaks a contract. Carries the field, the value and what is allowed.

    The value is shown as given unless `secret` is set; salts and token ids are always passed with `secret=True`.
    """

    def __init__(self, field: str, value: object, allowed: str, *, secret: bool = False) -> None:
        self.field = field
        self.value = "<redacted>" if secret else value
        self.allowed = allowed
        shown = _BOUNDED.repr(self.value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}: got {shown}, allowed: {allowed}")


class ContractErrors(ContractError):
    """Several at once, so that a file with three mistakes needs one look and not three. Field, value and allowed are
    those of the first."""

    def __init__(self, errors: Sequence[ContractError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.allowed)
        self.errors = tuple(errors)
        self.args = ("\n".join(str(error) for error in errors),)

    @classmethod
    def of(cls, errors: Sequence[ContractError]) -> ContractError:
        """One error as it is, several as one. At least one is given."""
        return errors[0] if len(errors) == 1 else cls(errors)


def each(error: ContractError) -> tuple[ContractError, ...]:
    """The single errors of one that may be several."""
    return error.errors if isinstance(error, ContractErrors) else (error,)
