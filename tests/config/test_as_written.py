"""A value is used as it is written, or refused with its path and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_semkv.cli import OK, REFUSED, main
from dynamo_semkv.config.forms import is_host, is_loopback
from dynamo_semkv.config.load import build, load_config
from dynamo_semkv.config.yaml_text import parse_scalar, parse_yaml
from dynamo_semkv.contracts.errors import ContractError
from tests.config.field_paths import leaves, nest

TEXTS = [path for path, limits in leaves() if limits.kind is str]
VALID = {
    "bus.url": "nats://broker:4222",
    "observe.otlp_endpoint": "http://collector:4318",
    "plugins.providers": "a.b:C",
    "plugins.scorers": "a.b:C",
    "connector.fetch.allowed_networks": "10.0.0.0/8",
    "connector.fetch.host": "10.0.0.7",
    "connector.fetch.advertise_host": "10.0.0.7",
}


@pytest.mark.parametrize("path", TEXTS)
def test_no_text_may_have_what_nobody_sees(path: str) -> None:
    valid = VALID.get(path, "localhost")
    build(nest(path, valid))
    for bad in (
        f"{valid}\n",
        f"\n{valid}",
        f"{valid} ",
        f"\t{valid}",
        f"{valid}\0",
        f"{valid}\u200b",
        f"{valid}\u2028",
        " ",
    ):
        with pytest.raises(ContractError, match="allowed: ") as caught:
            build(nest(path, bad))
        assert caught.value.field == path
        variable = "SEMKV_" + path.upper().replace(".", "__")
        with pytest.raises(ContractError) as caught:
            load_config(None, {variable: bad})
        assert caught.value.field == f"{variable} ({path})"


@pytest.mark.parametrize("text", ["010", "1:30", "0o17", "0b1", "yes", "on", "2020-01-01", "08", "1_", "="])
def test_what_yaml_s_versions_read_in_different_ways_is_a_text(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {{name: {text}}}\n")
    assert load_config(file, {"SEMKV_MODEL__PATH": text}).config.model == load_config(file, {}).config.model.__class__(
        name=text, path=text
    )
    for path in ("dashboard.port", "evidence.deadline_ms", "hints.enabled"):
        section, field = path.split(".")
        file.write_text(f"{section}: {{{field}: {text}}}\n")
        with pytest.raises(ContractError) as caught:
            load_config(file, {})
        assert (caught.value.field, caught.value.value) == (path, text)
        with pytest.raises(ContractError, match=text):
            load_config(None, {f"SEMKV_{section}__{field}".upper(): text})


@pytest.mark.parametrize(
    "text", ["!!int 010", "!!int '1:30'", "!!int 0b1", "!!float '1:30.5'", "!!bool yes", "!!null nothing"]
)
def test_nor_does_a_tag_make_a_number_of_it(text: str) -> None:
    with pytest.raises(ContractError, match="config line 1"):
        parse_scalar(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("+7", 7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("1e3", 1e3),
        ("1.5e3", 1.5e3),
        (".5", 0.5),
        ("1.", 1.0),
    ],
)
def test_what_they_read_alike_is_a_number(text: str, value: float) -> None:
    assert parse_scalar(text) == value


def test_a_number_where_text_is_meant_wants_quotes() -> None:
    with pytest.raises(ContractError, match=r"model\.name: got 123, allowed: printable text .*wants quotes"):
        build(parse_yaml("model: {name: 123}"))


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:4222",
        "nats://[::1]:4222",
        "tls://user:pa%2Css@broker.example.org",
        "broker:4222",
        "broker",
        "nats://a:4222, nats://b:4222",
        "ws://a:80,wss://b/path",
        "nats://semkv_bus.team.svc.cluster.local.:4222/",
    ],
)
def test_brokers_that_can_exist(url: str) -> None:
    assert build({"bus": {"url": url}}).bus.url == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://", "nats://"),
        ("nats://:4222", "nats://:4222"),
        ("nats://a:0", "nats://a:0"),
        ("nats://a:99999", "nats://a:99999"),
        ("nats://a:port", "nats://a:port"),
        ("nats://a:", "nats://a:"),
        ("NATS://a:4222", "NATS://a:4222"),
        ("http://a:4222", "http://a:4222"),
        ("nats//a:4222", "nats//a:4222"),
        ("nats://a:4222/stream", "nats://a:4222/stream"),
        ("nats://a:4222?tls=1", "nats://a:4222?tls=1"),
        ("nats://a:4222,", ""),
        ("nats://a:4222,,nats://b:4222", ""),
        ("nats://a:4222;nats://b:4222", "nats://a:4222;nats://b:4222"),
        ("nats://a:4222 nats://b:4222", "nats://a:4222 nats://b:4222"),
        ("nats://a:4222,ws://b:80", "nats://a:4222,ws://b:80"),
        ("nats://256.1.1.1:4222", "nats://256.1.1.1:4222"),
        ("nats://a..b:4222", "nats://a..b:4222"),
        (f"nats://{'a' * 64}:4222", f"nats://{'a' * 64}:4222"),
        ("nats://[::1:4222", "nats://[::1:4222"),
        ("::1", "::1"),
        ("nats://none:4222", "nats://none:4222"),
        ("nats://user:secret@a:0", "...@a:0"),
        ("nats://user:sec#ret@a:4222", "...@a:4222"),
        ("nats://user:sec,ret@a:4222", "<redacted>"),
    ],
)
def test_a_broker_that_cannot_exist_is_refused_and_its_password_not_shown(url: str, shown: str) -> None:
    with pytest.raises(ContractError, match=r"^bus\.url: got .*, allowed: URLs such as nats://host:4222") as caught:
        build({"bus": {"url": url}})
    assert caught.value.value == shown
    assert "sec" not in str(caught.value).partition("allowed")[0]


@pytest.mark.parametrize(
    "url", ["http://a:0", "http://a:99999", "http://", "http://a b", "ftp://a", "http://a#x", "http://999.9.9.9"]
)
def test_a_collector_that_cannot_exist_is_refused(url: str) -> None:
    with pytest.raises(ContractError, match=r"^observe\.otlp_endpoint: got"):
        build({"observe": {"otlp_endpoint": url}})


@pytest.mark.parametrize(
    "host",
    ["", "a b", "a:80", "[::1]", "1.2.3", "256.1.1.1", "0x7f.1", "a..b", "-a", "a" * 64, "bücher.example", "::1%a\n"],
)
def test_what_is_no_host(host: str) -> None:
    assert not is_host(host)
    for field in ("dashboard.host", "connector.metrics_host"):
        with pytest.raises(ContractError, match=field.replace(".", r"\.")):
            build(nest(field, host))


def test_a_name_that_begins_like_loopback_is_not_loopback() -> None:
    assert is_loopback("127.8.9.1")
    assert not is_loopback("127.0.0.1.example.org")
    with pytest.raises(ContractError, match=r"dashboard\.host"):
        build({"dashboard": {"host": "127.0.0.1.example.org"}})


@pytest.mark.parametrize("path", ["~/key", "~"])
def test_a_home_directory_that_nobody_expands_is_refused(path: str) -> None:
    with pytest.raises(ContractError, match=r"connector\.disk_path: got '~.*without ~"):
        build({"connector": {"disk_path": path}})


def test_an_empty_name_of_a_file_is_not_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMKV_CONFIG", "")
    assert main(["check-config"]) == REFUSED
    assert "the path of a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["check-config"], ["serve", "--config"], ["setup-bus", "--config"], ["doctor", "--config"]]
)
@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("credentials_file", b""),
        ("credentials_file", b"-----BEGIN NATS USER JWT-----\nno jwt\n------END NATS USER JWT------\n"),
        ("credentials_file", b"-----BEGIN NATS USER JWT-----\na.b.c\n-----BEGIN USER NKEY SEED-----\nSUBAD\n"),
        ("credentials_file", b"\xff\xfe"),
        ("tls_ca", b""),
        ("tls_ca", b"no certificate\n"),
    ],
)
def test_a_file_that_no_connection_can_be_made_with_is_refused(
    command: list[str], field: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client would read the first of them without end, and try the others without end."""
    named, file = tmp_path / "named", tmp_path / "c.yaml"
    named.write_bytes(content)
    file.write_text(f"bus: {{{field}: {named}}}\n")
    assert main([*command, str(file)]) == REFUSED
    assert f"bus.{field}: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("plugins: {providers: 'no.such.module:Provider'}", "plugins.providers"),
        ("plugins: {scorers: 'json:loads'}", "plugins.scorers"),
        (
            "evidence: {deadline_ms: 40, embedding: {enabled: true, model_path: /nowhere}}",
            "evidence.embedding.model_path",
        ),
    ],
)
def test_what_the_router_could_not_load_is_refused_before_it_starts(
    text: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert main(["check-config", str(file)]) == REFUSED
    assert f"{field}: got" in capsys.readouterr().err


def test_models_that_are_no_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.onnx", "tokenizer.json"):
        (tmp_path / name).write_text("nonsense")
    file = tmp_path / "c.yaml"
    file.write_text(f"evidence: {{deadline_ms: 40, embedding: {{enabled: true, model_path: {tmp_path}}}}}\n")
    assert main(["check-config", str(file)]) == REFUSED
    assert "evidence.embedding.enabled: got True" in capsys.readouterr().err


def test_a_disk_tier_that_is_a_file_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"connector: {{disk_path: {file}}}\n")
    assert main(["check-config", str(file)]) == OK
    assert "warning: connector.disk_path: got" in capsys.readouterr().err
