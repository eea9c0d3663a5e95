"""Peers: which addresses a pull may go to. An address comes from Dynamo's router, which has it from the worker that
published it; that is a claim all the same, so it is followed only into the networks that
`connector.fetch.allowed_networks` names, as a number and never as a name that somebody could make point elsewhere.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple

_ENDPOINT = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")
REST_SECONDS = 1.0
"""After a first failure; doubled with each further one, ..."""
MAX_REST_SECONDS = 60.0
_REMEMBERED = 1_024


class Address(NamedTuple):
    """Where a worker offers its blocks."""

    host: str
    port: int


class NotAllowed(ValueError):
    """An address that is not followed, and the name under which that is counted."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(kind)


def endpoint(host: str, port: int) -> str:
    """As Dynamo's router hands it on."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Peers:
    """Thread-safe."""

    def __init__(self, allowed_networks: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._networks = [ip_network(part.strip()) for part in allowed_networks.split(",")]
        self._clock = clock
        self._lock = threading.Lock()
        self._resting: OrderedDict[Address, tuple[int, float]] = OrderedDict()

    def address(self, text: str, *, trying: bool = False) -> Address:
        """Of a hint's `source_control_endpoint`. Raises NotAllowed: `bad_address`, `address_not_allowed`, `resting`.
        `trying`: a pull goes there now; where the last one failed, it is resting to all others until this one knows
        better."""
        found = _ENDPOINT.fullmatch(text)
        if found is None:
            raise NotAllowed("bad_address")
        try:
            host = ip_address(found[1] or found[2])
        except ValueError:
            raise NotAllowed("bad_address") from None
        port = int(found[3])
        if not 1 <= port <= 65_535:
            raise NotAllowed("bad_address")
        if not self._allows(host):
            raise NotAllowed("address_not_allowed")
        address = Address(str(host), port)
        with self._lock:
            failures, until = self._resting.get(address, (0, 0.0))
            if until > self._clock():
                raise NotAllowed("resting")
            if trying and failures:  # or one that hangs would hold every thread, each time its rest is over
                self._resting[address] = (failures, self._clock() + REST_SECONDS)
        return address

    def _allows(self, host: IPv4Address | IPv6Address) -> bool:
        mapped = getattr(host, "ipv4_mapped", None)
        return any(host in network or (mapped is not None and mapped in network) for network in self._networks)

    def failed(self, address: Address) -> None:
        """It is left alone for a while: a request that waits for it in vain is late for nothing."""
        with self._lock:
            failures = self._resting.pop(address, (0, 0.0))[0] + 1
            rest = min(REST_SECONDS * 2.0 ** min(failures - 1, 16), MAX_REST_SECONDS)
            self._resting[address] = (failures, self._clock() + rest)
            if len(self._resting) > _REMEMBERED:
                self._resting.popitem(last=False)

    def worked(self, address: Address) -> None:
        """The peer answered: it is asked again without a pause."""
        with self._lock:
            self._resting.pop(address, None)
