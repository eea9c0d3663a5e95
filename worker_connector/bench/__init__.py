"""Measures what the connector costs: `python -m worker_connector.bench`, or `dynamo_semkv bench connector`.

`lookup.py`: the engine's question for a prefix. `copying.py`: copies between slab and pages. `throughput.py`: prefill
and decode with the connector over those without. `pulling.py`: blocks from another worker. `rig.py`: the connector
without an engine.
"""
