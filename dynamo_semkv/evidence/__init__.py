"""Evidence: who may hold KV that helps this prompt. It proposes; it never decides a route and never promises a token.

Donors: `catalog.py` with `donor.py`; `stream.py` and `streams.py` (which events count), `emitters.py` (which donors an
emitter may announce), `expiry.py` (donors that are too old), `limits.py`, `retention.py` and `shares.py` (which donor
is evicted when a limit is reached), `chains.py` (compact tables). Lookup: `provider.py` (the protocol), `deadline.py`
with `worker.py`, `breaker.py` and `claims.py` (bounded and checked). The fingerprint provider: `fingerprint.py`,
`partition.py`, `postings.py`, `partners.py`, `alignment.py`. Optional ones: `embedding.py` with `encoder.py` and
`vectors.py`, `semblend.py`, both with `learner.py` and `routed.py` (which routed prompt became which donor).
"""
