"""How an extra that is missing is had. The package is on no index: `pip install dynamo-semkv[...]` would find nothing
of ours."""

from __future__ import annotations


def remedy(extra: str) -> str:
    """A command for a message."""
    return f"pip install '.[{extra}]' in a checkout of dynamo-semkv, or 'FILE.whl[{extra}]'"
