"""An OTLP/HTTP collector in memory: takes /v1/traces on loopback, decodes the protobuf, keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Seen:
    """One span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first of its trace."""
    start: int
    end: int
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]
    links: list[tuple[str, str]]
    failed: bool
    service: str
    resource: dict[str, Any] = field(default_factory=dict)


class Collector:
    """`with Collector() as collector: ... collector.url`. `answer`: the status it gives."""

    def __init__(self, answer: int = 200) -> None:
        self.answer = answer
        self.requests = 0
        self.raw: list[bytes] = []
        self._spans: list[Seen] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._took(self.path, self.headers["content-type"], body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.answer)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def spans(self) -> list[Seen]:
        with self._changed:
            return list(self._spans)

    def wait_for(self, ready: Callable[[list[Seen]], Any], seconds: float = 60.0) -> list[Seen]:
        with self._changed:
            found = self._changed.wait_for(lambda: ready(self._spans), seconds)
            names = sorted({span.name for span in self._spans})
            assert found, f"not within {seconds} s; there are {len(self._spans)} spans: {names}"
            return list(self._spans)

    def _took(self, path: str, content_type: str, body: bytes) -> None:
        assert path == "/v1/traces"
        assert content_type == "application/x-protobuf"
        with self._changed:
            self.requests += 1
            self.raw.append(body)
            if self.answer == 200:
                self._spans.extend(decoded(body))
            self._changed.notify_all()


def decoded(body: bytes) -> list[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    found = []
    for resource_spans in request.resource_spans:
        resource = _plain(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            assert scope_spans.scope.name == "dynamo_semkv"
            for span in scope_spans.spans:
                found.append(
                    Seen(
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start=span.start_time_unix_nano,
                        end=span.end_time_unix_nano,
                        attributes=_plain(span.attributes),
                        events={event.name: _plain(event.attributes) for event in span.events},
                        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                        failed=span.status.code == 2,
                        service=str(resource["service.name"]),
                        resource=resource,
                    )
                )
    return found


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
