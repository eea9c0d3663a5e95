"""How a leader and its ranks exchange messages, within one process and between processes.

`metadata.py`: a leader's orders, which the engine broadcasts. `channel.py`: results of the rank in the leader's
process. `wire.py` and `frames.py`, `local_server.py` and `rank_endpoint.py` (the leader's end), `remote_channel.py` (a
rank's end): results over a Unix-domain socket. `leader_link.py`: the one of both that a rank uses.
`rank_aggregator.py`: makes the messages of several ranks those of one.

The sockets are our own, not ZeroMQ's: libzmq 4.3.5 aborts the process, here the engine, when a connection comes to an
`ipc://` listener for which there is no descriptor, and it bounds neither the connections that never greet nor tells
which rank's connection has ended. Numbering, acknowledging and sending again would remain ours in any case."""
