"""What both sides say about themselves: names of spans and attributes, trace context, the OTLP exporter, log lines, connector metrics.

It lies beside the bus, so that router and connector share one names file and one catalogue. Nothing here knows a request's content.
"""
