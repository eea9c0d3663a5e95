"""What operators see: metrics, the snapshot behind the page and `status`, readiness.

Everything here reads; nothing decides. Counters wrap the pure stages (`measured`); gauges are read from one
`RouterState` when somebody asks, so that a replica that is gone has no series that could come back.
"""
