"""Outcomes: which route was confirmed, declined or never answered, each exactly once.

`intake.py` feeds the bus into `route_tracker.py` in one order (`replay.py`, `bus_clock.py`). The tracker holds open
routes, with `early_ends.py` (ends that come before their opening), `held_reports.py` (reports that come before their
route), `closed_routes.py` (what it remembers of closed ones) and `queues.py` (its containers). `join.py` pairs routes
with reports (pure), `closed.py` says what became of a route, `history.py` and `totals.py` sum up. Learning:
`lessons.py` (what a route teaches), `calibration.py` with `pool.py` (what claims are worth), `saving.py` (what a load
saved), `load_clock.py` (whether a worker's times are believed). Nothing here decides a route, and nothing is called
reuse that a backend did not confirm."""
