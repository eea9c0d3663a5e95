"""The engine: requests, scheduling, pages, forward passes and the connector's callbacks, in TensorRT-LLM's order.

What callers use: `engine.py`, `config.py`, `outcome.py` (what the engine tells of a request), `stepped.py` (one rank,
an iteration a call). One rank: `assembly.py` puts it together, `rank.py` is its thread, `executor.py` runs one
iteration, `scheduler.py` chooses which requests run, `request.py` is a request, `clients.py` serves its submitter,
`dummy.py` pads an empty batch, `fair_lock.py` is a lock in order of arrival. Pages: `block_manager.py`, `reuse.py`,
`events.py` (KV cache events), `page_guard.py` (who wrote which page). The connector's side: `connector_manager.py`,
`prefix.py`, `optional_hooks.py`, `trim.py`. The pass: `forward_pass.py`. `behaviours.py` lists the paths of
TensorRT-LLM that the engine takes on request, each with its source.
"""
