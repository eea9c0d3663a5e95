"""The router process: ingress, replicas, pipeline (pure), service (one request), runtime (the only place that imports
dynamo)."""
