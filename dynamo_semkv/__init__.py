"""Route advice for NVIDIA Dynamo: find KV donors, place on them, and count only what the backend confirms as reuse."""

__version__ = "0.1.0"
