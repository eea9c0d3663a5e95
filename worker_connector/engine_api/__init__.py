"""The engine as the connector sees it: base classes, cache layout, requests, pages, ranks and settings.

`engine.py` is the only module that imports tensorrt_llm; `connector_abc.py` and `cache_layout.py` stand in where it is
not installed. `request_view.py` reads a request, `pages.py` its pages, `geometry.py` the pool that the engine
registers. `world.py`: how many ranks share a leader. `settings.py`: what a connector is configured with, and what it
refuses at bring-up.
"""
