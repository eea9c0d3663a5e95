"""One request's life on the leader: lookup, offer, load, report, saves.

`prefix_lookup.py` turns the engine's question into an `attempt.py`, by `load_decision.py` (an offer, or the one reason
why not); `attempts.py` keeps those that are open. `load_order.py` and `async_loads.py`: what ranks are told to load.
`request_state.py`: what is known of a request that owns pages. `save_planner.py`: which of its blocks are saved.
`hints.py` and `hint_listener.py`: hints of routers. `engine_namespace.py`: whose KV it is. `ending.py`, `report.py` and
`attempt_trace.py`: what is told of it afterwards.
"""
