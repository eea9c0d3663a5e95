"""Which settings turn spans on, and where they go."""

from __future__ import annotations

import pytest

from dynamo_semkv.telemetry.target import otlp_target, shown

ON = {"OTEL_EXPORT_ENABLED": "true"}
HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@pytest.mark.parametrize(
    ("endpoint", "env", "url"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp", {}, "https://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:4318"}, "http://c:4318/v1/traces"),
        ("http://c:4317", {}, "http://c:4317/v1/traces"),  # said to us, so taken at its word
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, None),
        (None, ON, "http://localhost:4318/v1/traces"),
        (None, {"OTEL_EXPORT_ENABLED": "0"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/x"}, "http://c:4318/x"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORT_ENABLED": "false"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", **HTTP}, "http://c:4317/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "  "}, None),
    ],
)
def test_where_spans_go(endpoint: str | None, env: dict[str, str], url: str | None) -> None:
    assert otlp_target(endpoint, env)[:2] == (url, None)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({**ON, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://tempo:4317"}, "over gRPC by convention"),
        ({**ON, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf only"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "no http or https URL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:port"}, "is no URL"),
    ],
)
def test_what_cannot_be_spoken_is_said_with_the_remedy(env: dict[str, str], why: str) -> None:
    target = otlp_target(None, env)
    assert target.url is None
    assert why in str(target.warning)
    assert "observe.otlp_endpoint" in str(target.warning)


@pytest.mark.parametrize(
    ("text", "ratio"), [("0.25", 0.25), ("0", 0.0), ("1.5", None), ("nan", None), ("x", None), ("", None)]
)
def test_dynamos_sample_ratio(text: str, ratio: float | None) -> None:
    assert otlp_target("http://c", {"OTEL_TRACES_SAMPLE_RATIO": text}).sample_ratio == ratio


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("http://user:secret@c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("http://user:se/cr@et@c:4318/x?api-key=secret#secret", "http://c:4318/x"),
        ("user:secret@c", "c"),
        ("http://user:secret?@c", "http://c"),
    ],
)
def test_what_is_shown_of_a_url_has_no_credentials(url: str, said: str) -> None:
    assert shown(url) == said


@pytest.mark.parametrize(
    "url", ["http://u:secret@c:4317", "http://u:se/cret@c:x", "ftp://u:secret@c", "http://[::1@u:secret@c"]
)
def test_refused_endpoint_is_said_without_credentials(url: str) -> None:
    warning = str(otlp_target(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": url}).warning)
    assert "no spans are exported" in warning
    assert "cret" not in warning
