"""`connector.fetch`: pulling blocks from other workers."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, ClassVar

from msgspec import Meta

from dynamo_semkv.config.forms import NETWORKS, extra
from dynamo_semkv.config.limits import check_limits
from dynamo_semkv.config.section import GIB, MIB, Address, FilePath, Section
from dynamo_semkv.contracts.errors import ContractError


class FetchConfig(Section, frozen=True):
    """Pulling exact blocks from another worker's slab on Dynamo's `kv.fetch@1.0` hints."""

    PATH: ClassVar[str] = "connector.fetch"

    enabled: bool = False
    """Pull on hints, and serve others. False: neither."""
    secret_file: FilePath | None = None
    """File with the 16 to 1024 byte secret that all workers of the fleet share. It never goes over the wire. Needed
    with `enabled`."""
    host: Address = "127.0.0.1"
    """IP address that other workers connect to. 0.0.0.0 or ::, for all of them, needs `advertise_host`."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Data-parallel rank r takes this port plus r. 0: chosen by the system."""
    advertise_host: Address | None = None
    """IP address under which others reach this worker, such as the pod's; null: `host`."""
    allowed_networks: Annotated[str, Meta(min_length=1, max_length=4096, extra=extra(NETWORKS))] = "127.0.0.0/8,::1/128"
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
        if self.advertise_host is not None and ip_address(self.advertise_host).is_unspecified:
            allowed = "an IP address that others can connect to"
            raise ContractError("connector.fetch.advertise_host", self.advertise_host, allowed)
        if ip_address(self.host).is_unspecified and self.advertise_host is None and self.enabled:
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
        """The host that other workers are told to connect to."""
        return self.host if self.advertise_host is None else self.advertise_host
