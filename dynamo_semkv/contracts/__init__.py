"""What crosses a process boundary: one place for each wire type.

This package imports nothing of ours. Both `dynamo_semkv` and `worker_connector` build on it.

Who and what: `identity.py`, `namespace.py`, `location.py`, `keys.py`, `sketch.py`. Messages: `donor_events.py`,
`announcement.py`, `hints.py`, `report.py` (with the closed set of decline reasons), `route_events.py`, `load_plan.py`,
`evidence.py` (what a provider returns). How they travel: `subjects.py`, `pack.py`, `codec.py` (bytes to types, with
bounds), `errors.py`.
"""
