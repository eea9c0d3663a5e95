"""The scheduler side: the engine's callbacks in order, under one lock.

`leader.py` takes the callbacks. `cache_generation.py` keeps the books of one registered pool, with
`scheduler_output.py` (from an iteration to orders) and `active_requests.py` (requests that own pages).
`event_publisher.py` tells the world, with `cache_changes.py` and `publisher_numbers.py`. `cache_reset.py`: weights or
cache were changed. `api_variants.py`: variants of the connector API. `disk_prefetch_wait.py`: requests that wait for
their blocks from disk.
"""
