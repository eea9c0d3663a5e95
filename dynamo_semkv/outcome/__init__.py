"""Outcomes: which route was confirmed, declined or never answered, each exactly once.

`intake.py` feeds the bus into `route_tracker.py` (open routes; `early_ends.py`: ends that come first; `queues.py`: its
containers), in one order (`replay.py`, `bus_clock.py`). `join.py` pairs routes with reports (pure), `closed.py` says
what became of a route, `history.py` and `totals.py` sum up. Learning: `lessons.py` (what a route teaches),
`calibration.py` with `pool.py` (what claims are worth), `saving.py` (what a load saved), `load_clock.py` (whether a
worker's times are believed). Nothing here decides a route, and nothing is called reuse that a backend did not confirm.
"""
