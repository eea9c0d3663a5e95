"""What others may be told is here: donors, and the engine's own KV cache events.

`registry.py` keeps donors (`donor.py`, `donor_index.py`) and says so by `donor_event.py` and `donor_stream.py`;
`sink.py` is the way out. `kv_events.py`, `device_blocks.py` and `device_events.py` follow the engine's device cache;
its events come in at `kv_event_registry.py`, over `kv_event_socket.py` from another process, or by `event_stream.py`
with `event_batches.py` from the engine's own publisher.
"""
