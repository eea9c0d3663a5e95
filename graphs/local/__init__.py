"""The whole graph on one machine: nats-server, workers with the CPU reference engine, our routers, Dynamo's
frontend."""
