"""How a leader and its ranks exchange messages, within one process and between processes.

`channel.py`: in one process. `metadata.py`: what the engine broadcasts with an iteration. `wire.py`, `local_server.py`,
`rank_endpoint.py` (the leader's end) and `remote_channel.py` (a rank's): over a Unix-domain socket. `leader_link.py`:
whichever of both a rank has. `rank_aggregator.py` reduces the messages of several ranks to those of one;
`missing_ranks.py` names those that are awaited."""
