"""Who may read the page: everybody on this machine, or whoever holds the token.

    Access.of(config)        .host_allowed(host_header)   .token_allowed(authorization, cookie, query=None)

Without a token the page answers only to loopback names in `Host`: a web page of somebody else, whose name was made to
point here, gets nothing. With one, the token is compared in constant time, from `Authorization: Bearer`, or from the
cookie that `/?token=...` sets.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_semkv.config.forms import is_loopback
from dynamo_semkv.config.schema import DashboardConfig
from dynamo_semkv.contracts.errors import ContractError

MIN_TOKEN = 16
MAX_TOKEN = 1_024


@dataclass(frozen=True)
class Access:
    """The rules for one page. `host`: the address it listens on; `token` None: loopback only."""

    host: str
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: DashboardConfig) -> Access:
        """Reads the token file. Raises ContractError for a token that is missing, unreadable, too short or not
        printable."""
        token = read_token(config.token_file) if config.token_file is not None else None
        if token is None and not is_loopback(config.host):
            raise ContractError(
                "dashboard.host", config.host, "127.0.0.1, ::1 or localhost, unless dashboard.token_file is set"
            )
        return cls(config.host, token)

    @property
    def cookie(self) -> str:
        """The cookie's value: derived from the token, so a browser does not keep the token itself."""
        return hashlib.sha256(b"semkv-dashboard-cookie\0" + (self.token or "").encode()).hexdigest()

    def host_allowed(self, host_header: str | None) -> bool:
        """Whether the `Host` header may be answered: any with a token, else loopback names only."""
        return self.token is not None or (host_header is not None and is_loopback(_host_of(host_header)))

    def token_allowed(self, authorization: str | None, cookie: str | None, query: str | None = None) -> bool:
        """Whether one of the three is right; True where the page needs no token. `query`: the token of
        `/?token=...`."""
        if self.token is None:
            return True
        scheme, _, bearer = (authorization or "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else query
        return same_secret(given, self.token) or same_secret(cookie, self.cookie)


def read_token(path: str, field: str = "dashboard.token_file") -> str:
    """The token in the file. ContractError, which does not show the content, for a file without a usable token."""
    allowed = f"a file with {MIN_TOKEN} to {MAX_TOKEN} printable characters without blanks"
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(field, f"{path} ({type(error).__name__})", allowed) from error
    printable = token.isascii() and token.isprintable() and " " not in token
    if not printable or not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        raise ContractError(field, f"{path} (its content is not shown)", allowed)
    return token


def _host_of(header: str) -> str:
    """`Host` without the port, for `[::1]:80` and `127.0.0.1:80` alike."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def same_secret(given: str | None, expected: str) -> bool:
    """Compares in constant time; False for None."""
    # Header bytes that are no UTF-8, and JSON, can hold lone surrogates, which strict encoding refuses.
    return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())
