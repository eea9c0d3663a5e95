"""`connector.fetch`: pulling blocks from other workers."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Annotated, ClassVar

from msgspec import Meta

from dynamo_semkv.config.limits import check_limits
from dynamo_semkv.config.section import GIB, MIB, Section, Text
from dynamo_semkv.contracts.errors import ContractError


class FetchConfig(Section, frozen=True):
    """Pulling exact blocks from another worker's slab on Dynamo's `kv.fetch@1.0` hints."""

    PATH: ClassVar[str] = "connector.fetch"

    enabled: bool = False
    """Pull on hints, and serve others. False: neither."""
    secret_file: Text | None = None
    """File with the 16 to 1024 byte secret that all workers of the fleet share. It never goes over the wire. Needed with `enabled`."""
    host: Text = "127.0.0.1"
    """IP address that other workers connect to. 0.0.0.0 or ::, for all of them, needs `advertise_host`."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Data-parallel rank r takes this port plus r. 0: chosen by the system."""
    advertise_host: Text | None = None
    """IP address under which others reach this worker, such as the pod's; null: `host`."""
    allowed_networks: Text = "127.0.0.0/8,::1/128"
    """Networks, separated by commas, in which sources may be. A hint that names any other address is not followed."""
    wait_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 100.0
    """How long a hinted request may be held, before the engine sees it, for its blocks to come. 0: not at all."""
    deadline_ms: Annotated[float, Meta(ge=1.0, le=60_000.0)] = 1_000.0
    """After this a pull ends with what it has; also what a peer may take over one exchange."""
    max_pull_bytes: Annotated[int, Meta(ge=MIB, le=1024 * GIB)] = 256 * MIB
    """KV that one hint may bring."""
    max_in_flight_bytes: Annotated[int, Meta(ge=MIB, le=64 * GIB)] = 32 * MIB
    """Memory per rank for what has come and is not checked yet."""
    max_connections: Annotated[int, Meta(ge=1, le=1_024)] = 16
    """Workers that may pull from this rank at once."""

    def __post_init__(self) -> None:
        check_limits(self.PATH, self)
        for network in self.allowed_networks.split(","):
            try:
                ip_network(network.strip())
            except ValueError as error:
                raise ContractError(
                    "connector.fetch.allowed_networks",
                    network.strip(),
                    "networks such as 10.0.0.0/8, with commas between",
                ) from error
        for name in ("host", "advertise_host"):
            value = getattr(self, name)
            if value is not None and (address := _ip(value)) is None:
                raise ContractError(f"connector.fetch.{name}", value, "an IP address")
            if name == "advertise_host" and value is not None and address is not None and address.is_unspecified:
                raise ContractError("connector.fetch.advertise_host", value, "an IP address that others can connect to")
        listening = _ip(self.host)
        if listening is not None and listening.is_unspecified and self.advertise_host is None and self.enabled:
            raise ContractError(
                "connector.fetch.advertise_host", None, f"an IP address, as connector.fetch.host is {self.host}"
            )
        if self.enabled and self.secret_file is None:
            raise ContractError("connector.fetch.secret_file", None, "a file, as connector.fetch.enabled is true")
        if self.wait_ms > self.deadline_ms:
            raise ContractError(
                "connector.fetch.wait_ms", self.wait_ms, f"at most connector.fetch.deadline_ms, {self.deadline_ms}"
            )

    @property
    def advertised(self) -> str:
        return self.host if self.advertise_host is None else self.advertise_host


def _ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
