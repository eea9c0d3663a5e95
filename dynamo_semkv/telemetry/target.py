"""Where spans go, from the configuration and the environment. Pure.

    otlp_target(endpoint, env) -> Target
    shown(url) -> str                       for logs and messages

The variables are OpenTelemetry's, and the switch is Dynamo's: `OTEL_EXPORT_ENABLED`. We speak OTLP over HTTP with
protobuf; Dynamo's own processes speak gRPC unless told otherwise, so an endpoint that is plainly gRPC's is refused with
a reason instead of failing for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

TRACES_PATH = "/v1/traces"
DEFAULT_ENDPOINT = "http://localhost:4318"
GRPC_PORT = 4317
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_HTTP = "http/protobuf"


class Target(NamedTuple):
    """Where spans go, and how many are made."""

    url: str | None
    """Of the collector's trace path; None: no spans are made."""
    warning: str | None = None
    """What was asked for and cannot be followed."""
    sample_ratio: float | None = None
    """Share of the traces that begin here; None: what OpenTelemetry's own variables say. The sender's decision is
    always followed."""


def otlp_target(endpoint: str | None, env: Mapping[str, str]) -> Target:
    """`endpoint`: `observe.otlp_endpoint`, which needs no variable beside it. Without it `OTEL_EXPORT_ENABLED=true`, or
    one of OpenTelemetry's endpoint variables, turns spans on. `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER=none` and
    `OTEL_EXPORT_ENABLED=false` turn them off."""
    if _says(env, "OTEL_SDK_DISABLED", _TRUE):
        return Target(None)
    ratio = _ratio(env.get("OTEL_TRACES_SAMPLE_RATIO"))
    if endpoint is not None:
        return Target(_with_path(endpoint), None, ratio)
    if _says(env, "OTEL_EXPORT_ENABLED", _FALSE) or env.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return Target(None)
    exact, base = (env.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip() for name in ("TRACES_ENDPOINT", "ENDPOINT"))
    if not (exact or base or _says(env, "OTEL_EXPORT_ENABLED", _TRUE)):
        return Target(None)
    url = exact or _with_path(base or DEFAULT_ENDPOINT)
    problem = _problem(url, _protocol(env))
    if problem is not None:
        return Target(None, f"no spans are exported: {problem}; set observe.otlp_endpoint to the collector's HTTP port")
    return Target(url, None, ratio)


def shown(url: str) -> str:
    """Without user, password, query and fragment, also where it is no URL: what is in doubt is left out."""
    before, at, rest = url.rpartition("@")
    scheme, slashes, _ = before.partition("://")
    head = scheme + slashes if slashes else ""
    return (head if at else "") + rest.partition("?")[0].partition("#")[0]


def _problem(url: str, protocol: str | None) -> str | None:
    if protocol not in (None, _HTTP):
        return f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, spoken is {_HTTP} only"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return f"{shown(url)!r} is no URL"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{shown(url)!r} is no http or https URL"
    if protocol is None and port == GRPC_PORT:
        return f"port {GRPC_PORT} of {shown(url)!r} is OTLP over gRPC by convention"
    return None


def _protocol(env: Mapping[str, str]) -> str | None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        said = env.get(name, "").strip().lower()
        if said:
            return said
    return None


def _with_path(base: str) -> str:
    return base if base.endswith(TRACES_PATH) else base.rstrip("/") + TRACES_PATH


def _says(env: Mapping[str, str], name: str, what: frozenset[str]) -> bool:
    return env.get(name, "").strip().lower() in what


def _ratio(text: str | None) -> float | None:
    """None for what is no share: Dynamo too ignores a bad OTEL_TRACES_SAMPLE_RATIO."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None
