"""What crosses a process boundary: identity, namespace, keys, donor events, sketch, evidence, load plan, hints, report,
codec.

This package imports nothing of ours. Both `dynamo_semkv` and `worker_connector` build on it, and it is the one place
for each wire type.
"""
