"""What both sides say about themselves: names of spans and attributes, trace context, the OTLP exporter, log lines and
their throttle, connector metrics.

It lies below the bus, so that router and connector share one names file and one catalogue. Nothing here knows a
request's content.

Spans: `names.py`, `traceparent.py`, `target.py`, `tracing.py`. Logs: `logs.py`, `stderr_lines.py`, `throttled.py`.
Metrics of the connector: `metric_spec.py`, `catalogue.py`, `label_sets.py`, `connector_metrics.py`.
"""
