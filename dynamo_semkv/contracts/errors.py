"""The one error of the wire contracts. It lives alone so that every contract module can import it without a loop."""

from __future__ import annotations

from collections.abc import Sequence


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


class ContractErrors(ContractError):
    """Several at once, so that a file with three mistakes needs one look and not three. Field, value and allowed are those of the first."""

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
