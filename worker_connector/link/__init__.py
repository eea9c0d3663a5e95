"""How a leader and its ranks exchange messages, within one process and between processes.

`metadata.py`: a leader's orders, which the engine broadcasts. `channel.py`: results of the rank in the leader's
process. `wire.py` and `frames.py`, `local_server.py` and `rank_endpoint.py` (the leader's end), `remote_channel.py` (a
rank's end): results over a Unix-domain socket. `leader_link.py`: the one of both that a rank uses.
`rank_aggregator.py`: makes the messages of several ranks those of one.

The sockets are our own, not ZeroMQ's: libzmq (4.3.5; zeromq/libzmq#1306, zeromq/pyzmq#1591) aborts the process, here
the engine's, when an `ipc://` listener has no descriptor for a new connection, and it neither bounds connections that
never greet nor tells whose connection has ended. Numbers, acknowledgements and sending again, most of the code, would
be needed over ZeroMQ as well."""
