"""NATS JetStream, once for both packages: an embedded server, the four streams, a publisher thread, a replaying
subscriber.

The bus moves bytes. It knows subjects and retention, and nothing of what a message says; encoding is
`contracts/codec.py`'s.
"""
