"""The reference engine as a worker process of Dynamo.

`worker.py`: the process. `request.py`: Dynamo's request to the engine's. `stream.py`: the engine's tokens to Dynamo's
chunks. `handoff.py`: prefill and decode apart. `kv_events.py`: KV events to Dynamo. `disk.py` and `fetch.py`: a request
waits for its blocks from disk, or from another worker, before the engine sees it.
"""
