"""Evidence: who may hold KV that helps this prompt. It proposes; it never decides a route and never promises a token.

Donors: `catalog.py` with `donor.py`; `stream.py` and `streams.py` (which events count), `emitters.py` (who may speak
for whom), `expiry.py` (donors that are too old), `retention.py` and `shares.py` (who gives way when room ends),
`chains.py` (compact tables). Lookup: `provider.py` (the protocol), `deadline.py` with `worker.py`, `breaker.py` and
`claims.py` (bounded and checked). The fingerprint provider: `fingerprint.py`, `partition.py`, `postings.py`,
`partners.py`, `alignment.py`. Optional ones: `embedding.py` with `encoder.py` and `vectors.py`, `semblend.py`, both
with `learner.py` and `routed.py` (which routed prompt became which donor).
"""
