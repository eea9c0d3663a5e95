"""How a leader and its ranks talk, within one process and between processes.

`channel.py`: in one process. `metadata.py`: what the engine broadcasts with an iteration. `wire.py`, `local_server.py`,
`rank_endpoint.py` (the leader's end) and `remote_channel.py` (a rank's): over a Unix-domain socket. `leader_link.py`:
whichever of both a rank has. `rank_aggregator.py` reduces what several ranks say to what one would have said;
`missing_ranks.py` names those that are awaited.
"""
