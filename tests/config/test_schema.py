"""Defaults, limits and the one cross-field rule."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_semkv.config import schema
from dynamo_semkv.config.limits import limits_of
from dynamo_semkv.config.load import build
from dynamo_semkv.config.schema import Config, Section
from dynamo_semkv.contracts.errors import ContractError
from tests.config.field_paths import leaves, nest


def sections(kind: type[msgspec.Struct] = Config) -> list[type[msgspec.Struct]]:
    found = [kind]
    for limits in limits_of(kind).values():
        if issubclass(limits.kind, msgspec.Struct):
            found += sections(limits.kind)
    return found


def test_defaults_are_safe() -> None:
    config = Config()
    assert config.placement.mode is schema.PlacementMode.SHADOW
    assert config.connector.materialization is schema.Materialization.EXACT
    assert config.dashboard.host == "127.0.0.1"
    assert config.evidence.deadline_ms == 5.0


def test_every_section_refuses_unknown_keys_and_knows_its_path() -> None:
    for section in sections():
        assert section.__struct_config__.forbid_unknown_fields, section
        assert section.__struct_config__.frozen, section
        assert issubclass(section, Section)
    paths = [section.PATH for section in sections() if issubclass(section, Section)]
    assert len(paths) == len(set(paths))


def test_every_number_is_bounded() -> None:
    for section in sections():
        for name, limits in limits_of(section).items():
            if limits.kind in (int, float):
                assert limits.meta.ge is not None, f"{section.__name__}.{name}"
                assert limits.meta.le is not None, f"{section.__name__}.{name}"


@pytest.mark.parametrize(("path", "limits"), leaves(), ids=[path for path, _ in leaves()])
def test_out_of_range_and_wrong_type_name_path_value_and_allowed(path: str, limits: Any) -> None:
    bad: list[object] = [["a list"], {"a": "mapping"}]
    if limits.kind in (int, float):
        bad += [limits.meta.le + 1, limits.meta.ge - 1, "text", True, float("nan")]
    elif limits.kind is bool:
        bad += ["yes", 1]
    else:
        bad += [3, ""]
    if not limits.optional:
        bad.append(None)
    for value in bad:
        with pytest.raises(ContractError) as caught:
            build(nest(path, value))
        assert caught.value.field == path
        assert limits.allowed() in str(caught.value)


def test_limits_hold_for_structs_built_by_hand() -> None:
    with pytest.raises(ContractError, match=r"^evidence\.deadline_ms: got -1"):
        schema.EvidenceConfig(deadline_ms=-1)
    with pytest.raises(ContractError, match=r"^scoring\.prior\.exact_equivalent: got 1\.5"):
        schema.MatchPriors(exact_equivalent=1.5)


def test_a_page_without_a_token_stays_on_loopback() -> None:
    with pytest.raises(ContractError, match=r"dashboard\.host"):
        build({"dashboard": {"host": "0.0.0.0"}})
    assert build({"dashboard": {"host": "0.0.0.0", "token_file": "t"}}).dashboard.host == "0.0.0.0"
    assert not build({"dashboard": {"host": "0.0.0.0", "enabled": False}}).dashboard.enabled


@pytest.mark.parametrize(
    ("fetch", "message"),
    [
        ({"enabled": True}, r"connector\.fetch\.secret_file: got None, allowed: a file"),
        ({"allowed_networks": "10.0.0.0/8, here"}, r"connector\.fetch\.allowed_networks: got 'here'"),
        ({"allowed_networks": "10.0.0.1/8"}, r"connector\.fetch\.allowed_networks"),
        ({"host": "localhost"}, r"connector\.fetch\.host: got 'localhost', allowed: an IP address"),
        ({"advertise_host": "0.0.0.0"}, r"connector\.fetch\.advertise_host"),
        ({"enabled": True, "secret_file": "s", "host": "::"}, r"connector\.fetch\.advertise_host: got None"),
        (
            {"wait_ms": 2000, "deadline_ms": 1000},
            r"connector\.fetch\.wait_ms: got 2000.*at most connector\.fetch\.deadline_ms",
        ),
    ],
)
def test_what_fetching_needs_is_said(fetch: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        build({"connector": {"fetch": fetch}})


def test_fetching_is_off_and_on_loopback_until_it_is_asked_for() -> None:
    fetch = build({}).connector.fetch
    assert (fetch.enabled, fetch.host, fetch.allowed_networks) == (False, "127.0.0.1", "127.0.0.0/8,::1/128")
    far = {"enabled": True, "secret_file": "s", "host": "0.0.0.0", "advertise_host": "10.0.0.7"}
    assert build({"connector": {"fetch": far}}).connector.fetch.advertised == "10.0.0.7"
    with pytest.raises(ContractError, match=r"connector\.fetch\.enabled.*materialization is off"):
        build({"connector": {"materialization": "off", "fetch": far}})


def test_experimental_is_refused_without_request_local_kv() -> None:
    config = build({"connector": {"materialization": "experimental"}})
    with pytest.raises(ContractError, match="request-local KV"):
        schema.require_request_local_kv(config, advertised=False)
    schema.require_request_local_kv(config, advertised=True)
    schema.require_request_local_kv(Config(), advertised=False)
