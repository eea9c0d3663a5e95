"""Variables that Kubernetes writes into pods for Services of the namespace, beside those that are meant for us."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_semkv.config.load import load_config
from dynamo_semkv.config.schema import Config
from dynamo_semkv.contracts.errors import ContractError

SECTIONS = [field.name for field in msgspec.structs.fields(Config)]
NAMES = [f"semkv-{section}" for section in SECTIONS]
NAMES += [
    "semkv",
    "semkv-config",
    "semkv-nats",
    "semkv-agg-semkvrouter",
    "semkv-dashboard-v2",
    "semkv-bus--url",
    "semkv-connector--metrics",
]


def links(service: str, address: str = "10.96.0.7", port: int = 8090, protocol: str = "tcp") -> dict[str, str]:
    """What the kubelet makes of a Service with one named port, as its documentation lists it."""
    name = service.upper().replace("-", "_")
    one = f"{name}_PORT_{port}_{protocol.upper()}"
    url = f"{protocol}://{address}:{port}"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": str(port),
        f"{name}_SERVICE_PORT_HTTP_WEB": str(port),
        f"{name}_PORT": url,
        one: url,
        f"{one}_PROTO": protocol,
        f"{one}_PORT": str(port),
        f"{one}_ADDR": address,
    }


@pytest.mark.parametrize("service", NAMES)
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_a_service_of_any_name_changes_nothing_and_is_not_complained_about(service: str, protocol: str) -> None:
    plain = load_config(None, {})
    loaded = load_config(None, links(service, protocol=protocol))
    assert loaded == plain
    assert loaded == load_config(None, links(service, address="fd00::7", protocol=protocol))


@pytest.mark.parametrize(
    "env",
    [
        {"SEMKV_DASHBOARD_PORT": "8090"},
        {"SEMKV_DASHBOARD__PROT": "8090"},
        {"SEMKV_DASHBOARD__PORT": "tcp"},
        {"SEMKV_BUS_URL": "nats://10.0.0.1:4222"},
    ],
)
def test_what_was_meant_for_us_is_still_refused_when_it_is_wrong(env: dict[str, str]) -> None:
    with pytest.raises(ContractError, match=next(iter(env))):
        load_config(None, {**links("semkv-dashboard"), **env})


def test_fields_are_taken_beside_links() -> None:
    env = {**links("semkv-dashboard"), "SEMKV_DASHBOARD__PORT": "9701", "SEMKV_CONNECTOR__METRICS_PORT": "9400"}
    loaded = load_config(None, env)
    assert (loaded.config.dashboard.port, loaded.config.connector.metrics_port) == (9701, 9400)
