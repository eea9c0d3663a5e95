"""NATS JetStream, once for both packages: an embedded server, the four streams, a publisher thread, a replaying
subscriber.

The bus moves bytes. It knows subjects and retention, and nothing of what a message says; encoding is
`contracts/codec.py`'s.

Sending: `publisher.py` (the thread that sends), `outbox.py` (what waits to be sent),
`publishing.py` (what a caller needs of it), `publishable.py` (what may be sent), `packing.py` and `pace.py` (several
records in one message), `acks.py`. Receiving: `subscriber.py` with `subscription.py`. The broker:
`connection.py`, `streams.py`, `setup.py` (makes the streams once), `refusals.py` (what it does not take),
`server_check.py` (its version), `inspection.py` (for `doctor`), `access_files.py` (credentials and certificates),
`server.py` with `child_process.py` (an embedded nats-server).
"""
