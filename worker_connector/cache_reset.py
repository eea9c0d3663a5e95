"""Where whoever changes the engine's weights or empties its cache says so.

TensorRT-LLM tells a connector neither. A weight update runs in the process of each rank (`tensorrt_llm.llmapi.rlhf_utils.WorkerExtension`,
`update_weights`), beside the connector and between two iterations, so that is where to call `weights_changed`:

    class Extension(WorkerExtension):
        def update_weights(self, ipc_handles=None):
            super().update_weights(ipc_handles)
            if ipc_handles is None:  # the last call of an update
                weights_changed("step-42")
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """A leader."""

    def reset_cache(self) -> None: ...

    def weights_changed(self, revision: str) -> None: ...


_lock = threading.Lock()
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def owns_cache(owner: Owner) -> None:
    """As long as it lives."""
    with _lock:
        _owners.add(owner)


def reset_cache() -> int:
    """Everything that connectors of this process have saved is worth nothing, and so are their donors. Returns how many heard it: 0 in the
    processes of other ranks, where there is nothing to forget. Thread-safe; does not wait for a forward pass."""
    owners = _all()
    for owner in owners:
        owner.reset_cache()
    return len(owners)


def weights_changed(revision: str) -> int:
    """As `reset_cache`, for other weights. `revision` names them, the same on all replicas that serve them: KV of before and after is
    told apart by it, also on disk and after a restart. ValueError for an empty one."""
    if not isinstance(revision, str) or not revision.strip():
        raise ValueError(f"weights_changed: revision = {revision!r}, expected a name of the new weights")
    owners = _all()
    for owner in owners:
        owner.weights_changed(revision.strip())
    _log.info("semkv connector: weights are %r now; %d caches were emptied", revision, len(owners))
    return len(owners)


def _all() -> list[Owner]:
    with _lock:
        return list(_owners)
