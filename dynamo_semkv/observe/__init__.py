"""What operators see: metrics, the snapshot behind the page and `status`, readiness, findings of `doctor`.

Everything here reads; nothing decides. Gauges are read from one `RouterState` (`state.py`, collected by
`state_collector.py`) when somebody asks, so that a replica that is gone has no series that could come back.
`snapshot.py`: the state as JSON. `catalogue.py`: each metric once; `metrics.py`: the Prometheus registry;
`reference.py` and `rfc.py`: docs/metrics.md. `health.py`: readiness. `diagnosis.py`: what `doctor` finds.
`dynamo_counters.py`: Dynamo's own counters.
"""
