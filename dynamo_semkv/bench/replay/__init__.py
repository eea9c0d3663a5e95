"""Replays a request trace through simulated replicas under several placement policies: what placement is worth, and how
it learns.

`python -m dynamo_semkv.bench.replay --help`. `trace.py` reads traces, `replica.py` is the cost model, `policies.py` the
policies (ours is the real score sheet, gate, route tracker and calibration), `run.py` the replay and its figures.
"""
