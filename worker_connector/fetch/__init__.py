"""Blocks from other workers of the fleet.

`peer_fetch.py` puts the parts of one leader together: `fetcher.py` pulls (threads and budgets), `peers.py` says from
which addresses, `tier.py` what may enter, `export.py` what is shown, `weights_fingerprint.py` whether both run the same
weights. `transport.py`: what any transport must do; `client.py`, `server.py` and `wire.py` do it over TCP.
`router_hint.py` tells Dynamo's router.
"""
