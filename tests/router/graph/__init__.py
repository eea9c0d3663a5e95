"""Real processes for the router's tests: nats-server, workers, routers and the frontend, all on 127.0.0.1.

Nothing here imports ``dynamo``; the processes do.
"""
